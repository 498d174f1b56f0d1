"""Turns and sessions as they come in: written, linked, continued."""
