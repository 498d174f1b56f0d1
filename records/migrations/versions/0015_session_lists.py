"""Indexes by which pages list sessions, the newest first, of all scopes or of one."""

from __future__ import annotations

from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

_INDEXES = (
    ("ix_sessions_created_at_session_id", ["created_at", "session_id"]),
    ("ix_sessions_scope_created_at_session_id", ["scope", "created_at", "session_id"]),
)


def upgrade() -> None:
    """Add the indexes."""
    for name, columns in _INDEXES:
        op.create_index(name, "sessions", columns)


def downgrade() -> None:
    """Drop them."""
    for name, _ in _INDEXES:
        op.drop_index(name, "sessions")
