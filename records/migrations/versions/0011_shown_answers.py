"""How a client showed an answer when it went on from it, and calls to be found by their content."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_INDEX = "ix_turns_scope_calls_key_created_at"


def upgrade() -> None:
    """Add the columns; they are nullable, so that older processes go on writing meanwhile."""
    op.add_column("turns", sa.Column("calls_key", sa.Text(), nullable=True))
    op.add_column("turns", sa.Column("echo_changes", sa.Text(), nullable=True))
    op.create_index(_INDEX, "turns", ["scope", "calls_key", "created_at"])


def downgrade() -> None:
    """Drop the columns with what they hold."""
    op.drop_index(_INDEX, "turns")
    op.drop_column("turns", "echo_changes")
    op.drop_column("turns", "calls_key")
