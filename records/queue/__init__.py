"""Turns on their way through judge and teacher: waiting, claimed, voted on, scored."""
