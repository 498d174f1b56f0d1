"""Alembic's entry: runs the migrations on the connection and in the transaction of its caller."""

from __future__ import annotations

from alembic import context

from records.hints import rows as _hints  # noqa: F401  its tables
from records.tables import key_rows as _keys  # noqa: F401  its tables
from records.tables.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    # SQLite's schema changes are transactional once the driver's own transactions are off.
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
