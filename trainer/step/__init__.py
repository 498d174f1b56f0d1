"""One step after the other: lease, update, checks, calibration, reports."""
