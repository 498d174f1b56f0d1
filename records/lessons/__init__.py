"""Lessons: samples drawn anew at recorded states, for a hint or against its excess."""
