"""What the database refuses, kept in a file until the database takes it."""
