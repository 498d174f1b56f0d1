"""Hinted prompts, and a teacher's scores of the sampled ids under them."""
