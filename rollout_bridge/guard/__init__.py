"""What the run's own canaries say about each version, for the trainer: whether it may go on.

It samples and judges nothing.
"""
