"""Up to which version store and manifests were found equal, and indexes for what came after."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table and the indexes."""
    op.create_table(
        "agreements",
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("link", sa.Text(), nullable=False),
        sa.Column("agreed_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_agreements"),
    )
    trained = sa.text("trained_version IS NOT NULL")
    op.create_index(
        "ix_turns_trained_version",
        "turns",
        ["trained_version"],
        sqlite_where=trained,
        postgresql_where=trained,
    )
    op.create_index("ix_sessions_external_id", "sessions", ["external_id"])


def downgrade() -> None:
    """Drop them."""
    op.drop_index("ix_sessions_external_id", table_name="sessions")
    op.drop_index("ix_turns_trained_version", table_name="turns")
    op.drop_table("agreements")
