"""The records read for people: counts, diagnosis, exports, what became of recordings."""
