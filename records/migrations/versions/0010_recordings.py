"""Turns of recordings: where they come from, their votes, and that live turns go before them.

Latencies may be unknown: nobody measured those of a recording.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_WITH_LATENCY = ("turns", "votes")


def upgrade() -> None:
    """Add the table and the column, by which waiting turns are ordered."""
    op.create_table(
        "recordings",
        sa.Column("turn_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("held_out", sa.Boolean(), nullable=False),
        sa.Column("votes", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("turn_id", name="pk_recordings"),
        sa.ForeignKeyConstraint(["turn_id"], ["turns.turn_id"], name="fk_recordings_turn_id"),
    )
    op.add_column(
        "turns", sa.Column("priority", sa.Integer(), nullable=False, server_default=sa.text("0"))
    )
    op.drop_index("ix_turns_state_created_at", "turns")
    op.create_index(
        "ix_turns_state_priority_created_at", "turns", ["state", "priority", "created_at"]
    )
    for table in _WITH_LATENCY:
        _set_latency(table, nullable=True)


def downgrade() -> None:
    """Drop what `upgrade` added; an unknown latency becomes 0."""
    for table in _WITH_LATENCY:
        op.execute(f"UPDATE {table} SET latency_s = 0 WHERE latency_s IS NULL")
        _set_latency(table, nullable=False)
    op.drop_index("ix_turns_state_priority_created_at", "turns")
    op.create_index("ix_turns_state_created_at", "turns", ["state", "created_at"])
    op.drop_column("turns", "priority")
    op.drop_table("recordings")


def _set_latency(table: str, *, nullable: bool) -> None:
    if op.get_bind().dialect.name != "sqlite":
        op.alter_column(table, "latency_s", existing_type=sa.Double(), nullable=nullable)
        return
    # SQLite cannot change a column; a new one takes its place, with what it held.
    default = None if nullable else sa.text("0")
    op.add_column(
        table, sa.Column("new_latency_s", sa.Double(), nullable=nullable, server_default=default)
    )
    op.execute(f"UPDATE {table} SET new_latency_s = latency_s")
    op.drop_column(table, "latency_s")
    op.execute(f"ALTER TABLE {table} RENAME COLUMN new_latency_s TO latency_s")
