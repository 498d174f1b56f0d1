"""What people decided on the judge's hints before they train."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "reviews",
        sa.Column("turn_id", sa.Text(), nullable=False),
        sa.Column("scope", sa.Text(), nullable=False),
        sa.Column("decision", sa.String(length=32), nullable=False),
        sa.Column("proposed", sa.Text(), nullable=False),
        sa.Column("hint", sa.Text(), nullable=True),
        sa.Column("author", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("turn_id", name="pk_reviews"),
        sa.ForeignKeyConstraint(["turn_id"], ["turns.turn_id"], name="fk_reviews_turn_id"),
    )
    op.create_index("ix_reviews_scope_decision", "reviews", ["scope", "decision"])


def downgrade() -> None:
    """Drop the table with what it holds."""
    op.drop_table("reviews")
