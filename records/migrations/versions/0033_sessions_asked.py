"""In how many sessions' words the judge has looked for a rule.

A hint of before, about which that is not known, is looked at again with its next source.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; no row is rewritten."""
    op.add_column(
        "hints", sa.Column("sessions_asked", sa.Integer(), nullable=False, server_default="0")
    )


def downgrade() -> None:
    """Drop it."""
    op.drop_column("hints", "sessions_asked")
