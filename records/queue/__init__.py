"""Turns on their way through judge and teacher: claimed, voted on, scored, waiting."""
