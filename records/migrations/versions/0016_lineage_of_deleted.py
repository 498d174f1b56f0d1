"""What is known of a deleted session: the versions that were trained on it, digests of its names.

The columns are nullable: a process of the program before this one can go on deleting while the
others are restarted. Of what it deletes, and of what was deleted before, the versions are unknown.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

_COLUMNS = ("versions", "pending_lessons", "name_digests")


def upgrade() -> None:
    """Add the columns."""
    for name in _COLUMNS:
        op.add_column("deletions", sa.Column(name, sa.Text(), nullable=True))


def downgrade() -> None:
    """Drop what `upgrade` added, with what it holds."""
    for name in _COLUMNS:
        op.drop_column("deletions", name)
