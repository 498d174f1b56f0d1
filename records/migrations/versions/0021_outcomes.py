"""What sessions came to."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "outcomes",
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("value", sa.Double(), nullable=True),
        sa.Column("source", sa.String(length=32), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("failure", sa.Text(), nullable=True),
        sa.Column("claim_owner", sa.Text(), nullable=True),
        sa.Column("claim_until", sa.Double(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("session_id", name="pk_outcomes"),
        sa.ForeignKeyConstraint(
            ["session_id"], ["sessions.session_id"], name="fk_outcomes_session_id"
        ),
    )
    op.create_index("ix_outcomes_claim_until", "outcomes", ["claim_until"])


def downgrade() -> None:
    """Drop the table with what it holds."""
    op.drop_table("outcomes")
