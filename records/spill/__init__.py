"""What the database refuses, kept in a file until it takes it."""
