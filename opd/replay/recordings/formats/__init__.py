"""Readers of the formats of recordings: lines of a file -> sessions of turns."""
