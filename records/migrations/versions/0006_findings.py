"""Secrets and personal data that were found in a turn, by kind."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; it is nullable, so that older processes go on writing meanwhile."""
    op.add_column("turns", sa.Column("findings", sa.Text(), nullable=True))


def downgrade() -> None:
    """Drop the column with what it holds."""
    op.drop_column("turns", "findings")
