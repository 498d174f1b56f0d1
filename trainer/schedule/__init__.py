"""What orders training to stop or to go back."""
