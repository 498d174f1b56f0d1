"""An index for the newest trained turns."""

from __future__ import annotations

from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add it."""
    op.create_index("ix_samples_version", "samples", ["version"])


def downgrade() -> None:
    """Drop it."""
    op.drop_index("ix_samples_version", "samples")
