"""This project's own export of its records -> sessions of turns."""
