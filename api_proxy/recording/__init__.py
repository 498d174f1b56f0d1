"""What of a turn is kept, and what becomes of it where the database does not answer."""
