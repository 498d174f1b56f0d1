"""Votes on what followed a turn: asked, read, screened, decided."""
