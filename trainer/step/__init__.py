"""One step after the other: lease, update, checks, calibration, what is reported of it."""
