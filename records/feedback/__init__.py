"""Feedback given beside the conversation."""
