"""Search in the text of turns: SQLite's FTS5, PostgreSQL's tsvector."""
