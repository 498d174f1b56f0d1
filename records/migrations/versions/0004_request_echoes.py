"""What a client may read again of its request.

Nullable: a process of the program before this one can go on writing to the database.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.add_column("turns", sa.Column("request_echo", sa.Text(), nullable=True))


def downgrade() -> None:
    """Drop the column, with what it holds."""
    op.drop_column("turns", "request_echo")
