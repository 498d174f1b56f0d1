"""What sessions came to, and which turns are rewarded by that."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table and the column."""
    op.create_table(
        "outcomes",
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("value", sa.Double(), nullable=True),
        sa.Column("source", sa.String(length=32), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("failure", sa.Text(), nullable=True),
        sa.Column("covers_until", sa.Double(), nullable=True),
        sa.Column("claim_owner", sa.Text(), nullable=True),
        sa.Column("claim_until", sa.Double(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("session_id", name="pk_outcomes"),
        sa.ForeignKeyConstraint(
            ["session_id"], ["sessions.session_id"], name="fk_outcomes_session_id"
        ),
    )
    unsaid = sa.text("drop_reason IN ('no_outcome', 'no_next_state')")
    op.create_index(
        "ix_turns_unsaid_updated_at",
        "turns",
        ["updated_at"],
        sqlite_where=unsaid,
        postgresql_where=unsaid,
    )
    op.add_column(
        "verdicts",
        sa.Column("awaits_outcome", sa.Boolean(), nullable=False, server_default=sa.false()),
    )


def downgrade() -> None:
    """Drop the table and the column with what they hold."""
    op.drop_column("verdicts", "awaits_outcome")
    op.drop_index("ix_turns_unsaid_updated_at", table_name="turns")
    op.drop_table("outcomes")
