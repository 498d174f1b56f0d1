"""Two runs of the same recorded turns, compared: `opd replay compare`."""
