"""What API keys may use, and what they used each day."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_LIMITS = ("requests_per_minute", "tokens_per_minute", "tokens_per_day", "max_concurrent")


def upgrade() -> None:
    """Add the columns, NULL for keys without limits, and the table."""
    for name in _LIMITS:
        op.add_column("api_keys", sa.Column(name, sa.BigInteger(), nullable=True))
    op.create_table(
        "key_usage",
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("day", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("num_tokens", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("key_id", "day", name="pk_key_usage"),
    )


def downgrade() -> None:
    """Drop what `upgrade` added, with what it holds."""
    op.drop_table("key_usage")
    for name in reversed(_LIMITS):
        op.drop_column("api_keys", name)
