"""When generation waits for training, and what orders training to stop or to go back."""
