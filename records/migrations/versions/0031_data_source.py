"""Where the task of a turn comes from, as its client or its recording says.

It is not known for turns of before, and a process of the earlier program writes none.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; no row is rewritten."""
    op.add_column("turns", sa.Column("data_source", sa.Text(), nullable=True))


def downgrade() -> None:
    """Drop it."""
    op.drop_column("turns", "data_source")
