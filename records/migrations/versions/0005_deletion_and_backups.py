"""Deleted sessions, backups, the end user of a turn, and indexes for who deletes.

The column is nullable: a process of the program before this one can go on writing to the database
while the others are restarted.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_INDEXES = (
    ("message_nodes", "parent_id"),
    ("turns", "parent_turn_id"),
    ("turns", "toolset_hash"),
    ("turns", "user_id"),
    ("turn_tokens", "token_parent_id"),
)


def upgrade() -> None:
    """Add the tables, the column and the indexes."""
    op.add_column("turns", sa.Column("user_id", sa.Text(), nullable=True))
    for table, column in _INDEXES:
        op.create_index(f"ix_{table}_{column}", table, [column])
    op.create_table(
        "deletions",
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("deleted_at", sa.Double(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("session_id", name="pk_deletions"),
    )
    op.create_table(
        "backups",
        sa.Column("backup_id", sa.Text(), nullable=False),
        sa.Column("location", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("backup_id", name="pk_backups"),
    )


def downgrade() -> None:
    """Drop what `upgrade` added, with what it holds."""
    for table in ("backups", "deletions"):
        op.drop_table(table)
    for table, column in _INDEXES:
        op.drop_index(f"ix_{table}_{column}", table_name=table)
    op.drop_column("turns", "user_id")
