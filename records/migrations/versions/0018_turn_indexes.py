"""Indexes of what grew with the number of turns: the newest version that sampled any, and recent
side turns.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

_NEWEST = "ix_turns_newest_version"
_SIDE_TURNS = "ix_turns_side_scope_created_at"
_IS_SIDE = sa.text("drop_reason = 'side_turn'")


def upgrade() -> None:
    """Add the indexes."""
    op.create_index(_NEWEST, "turns", ["newest_version"])
    op.create_index(
        _SIDE_TURNS,
        "turns",
        ["scope", "created_at"],
        sqlite_where=_IS_SIDE,
        postgresql_where=_IS_SIDE,
    )


def downgrade() -> None:
    """Drop them."""
    op.drop_index(_SIDE_TURNS, "turns")
    op.drop_index(_NEWEST, "turns")
