"""What people said of a turn after they had its answer, tied to the turn by its response's id."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "feedback",
        sa.Column("feedback_id", sa.Text(), nullable=False),
        sa.Column("turn_id", sa.Text(), nullable=False),
        sa.Column("scope", sa.Text(), nullable=False),
        sa.Column("external_id", sa.Text(), nullable=True),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("outcome", sa.String(length=32), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("feedback_id", name="pk_feedback"),
        sa.ForeignKeyConstraint(["turn_id"], ["turns.turn_id"], name="fk_feedback_turn_id"),
    )
    op.create_index("ix_feedback_turn_id", "feedback", ["turn_id"])
    op.create_index(
        "ix_feedback_scope_external_id", "feedback", ["scope", "external_id"], unique=True
    )


def downgrade() -> None:
    """Drop the table with what it holds."""
    op.drop_table("feedback")
