"""The records as a whole: backup, verification, deletion, housekeeping."""
