"""Alembic migrations of the store; run by `records.database.schema` when a store is opened."""
