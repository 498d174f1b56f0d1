"""Why the hint of a vote was refused."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; it is nullable, so that older processes go on writing meanwhile."""
    op.add_column("votes", sa.Column("rejected", sa.String(32), nullable=True))


def downgrade() -> None:
    """Drop the column with what it holds."""
    op.drop_column("votes", "rejected")
