"""Alembic migrations of the store; run by `records.schema` when a store is opened."""
