"""What is kept of a turn, and what happens if the database does not answer."""
