"""What is measured of a version, and what it means for each hint."""
