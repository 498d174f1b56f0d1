"""Lessons: fresh samples at recorded states, for a hint or against its excess."""
