"""Turns on their way into a step: leased, committed, reconciled."""
