"""What turns were worth before they were answered."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "turn_values",
        sa.Column("turn_id", sa.Text(), nullable=False),
        sa.Column("value", sa.Double(), nullable=True),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("turn_id", name="pk_turn_values"),
        sa.ForeignKeyConstraint(["turn_id"], ["turns.turn_id"], name="fk_turn_values_turn_id"),
    )


def downgrade() -> None:
    """Drop it with what it holds."""
    op.drop_table("turn_values")
