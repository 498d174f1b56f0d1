"""Feedback given outside the conversation."""
