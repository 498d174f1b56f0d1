"""An index of the answers to a prompt by version, in place of the one that knew prompts alone."""

from __future__ import annotations

from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Replace the index."""
    op.create_index(
        "ix_turns_prompt_node_id_newest_version", "turns", ["prompt_node_id", "newest_version"]
    )
    op.drop_index("ix_turns_prompt_node_id", table_name="turns")


def downgrade() -> None:
    """The narrower one again."""
    op.create_index("ix_turns_prompt_node_id", "turns", ["prompt_node_id"])
    op.drop_index("ix_turns_prompt_node_id_newest_version", table_name="turns")
