"""What is asked about a hint: whether it is kept, where it applies, and what its exceptions are."""
