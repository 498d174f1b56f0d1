"""What is measured of a version, and what becomes of each hint by it."""
