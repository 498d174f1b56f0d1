"""Where side samples come from."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; all that there are were drawn by the policy."""
    op.add_column(
        "side_samples",
        sa.Column("source", sa.String(length=32), nullable=False, server_default="policy"),
    )


def downgrade() -> None:
    """Drop it."""
    op.drop_column("side_samples", "source")
