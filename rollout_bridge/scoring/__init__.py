"""Hinted prompts, and what a teacher says of the sampled ids under them."""
