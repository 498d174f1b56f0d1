"""What the run's own canaries say of each version, as the trainer needs it: whether it may go on.

It samples and judges nothing.
"""
