"""Waiting turns are found by scope, so that each scope's oldest is one look into an index."""

from __future__ import annotations

from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

_OLD, _NEW = "ix_turns_state_priority_created_at", "ix_turns_state_priority_scope_created_at"


def upgrade() -> None:
    """Replace the index of waiting turns."""
    op.drop_index(_OLD, "turns")
    op.create_index(_NEW, "turns", ["state", "priority", "scope", "created_at"])


def downgrade() -> None:
    """Bring the earlier index back."""
    op.drop_index(_NEW, "turns")
    op.create_index(_OLD, "turns", ["state", "priority", "created_at"])
