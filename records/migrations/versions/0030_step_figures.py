"""What a step computed at each token of a turn: ratios, weights, entropies, engine against trainer.

Rows of before have none, and a process of the earlier program writes none.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None

_COLUMNS = ("log_ratios", "weights", "entropies", "engine_gaps")


def upgrade() -> None:
    """Add the columns; no row is rewritten."""
    for name in _COLUMNS:
        op.add_column("samples", sa.Column(name, sa.LargeBinary(), nullable=True))


def downgrade() -> None:
    """Drop them."""
    for name in _COLUMNS:
        op.drop_column("samples", name)
