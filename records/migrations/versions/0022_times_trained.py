"""How often a turn has trained, and how often it may train again."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add both columns; every trained turn has trained once."""
    for name in ("times_trained", "times_left"):
        op.add_column("turns", sa.Column(name, sa.Integer(), nullable=False, server_default="0"))
    op.execute("UPDATE turns SET times_trained = 1 WHERE state = 'trained'")
    left = sa.text("times_left > 0")
    op.create_index(
        "ix_turns_again_scope_created_at",
        "turns",
        ["scope", "created_at"],
        sqlite_where=left,
        postgresql_where=left,
    )


def downgrade() -> None:
    """Drop both columns."""
    op.drop_index("ix_turns_again_scope_created_at", table_name="turns")
    for name in ("times_left", "times_trained"):
        op.drop_column("turns", name)
