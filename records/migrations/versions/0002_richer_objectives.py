"""Several hint candidates, rewards, top-k scores, named teachers, side samples, routed experts.

New columns are nullable or have a default: a process of the program before this one can go on
writing to the database while the others are restarted.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_ADDED = {
    "turns": ["teacher_key"],
    "verdicts": ["candidates", "reward"],
    "scores": ["candidate", "topk_ids", "topk_logprobs"],
}


def upgrade() -> None:
    """Add the columns and the tables."""
    op.add_column("turns", sa.Column("teacher_key", sa.Text(), nullable=True))
    op.add_column("verdicts", sa.Column("candidates", sa.Text(), nullable=True))
    op.add_column("verdicts", sa.Column("reward", sa.Double(), nullable=True))
    op.add_column(
        "scores", sa.Column("candidate", sa.Integer(), nullable=False, server_default="0")
    )
    op.add_column("scores", sa.Column("topk_ids", sa.LargeBinary(), nullable=True))
    op.add_column("scores", sa.Column("topk_logprobs", sa.LargeBinary(), nullable=True))
    op.create_table(
        "routed_experts",
        sa.Column("turn_id", sa.Text(), nullable=False),
        sa.Column("experts", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("turn_id", name="pk_routed_experts"),
        _of_turn("routed_experts"),
    )
    op.create_table(
        "side_samples",
        sa.Column("turn_id", sa.Text(), nullable=False),
        sa.Column("policy_version", sa.BigInteger(), nullable=False),
        sa.Column("num_samples", sa.Integer(), nullable=False),
        sa.Column("ids", sa.LargeBinary(), nullable=False),
        sa.Column("rollout_logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("teacher_logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("turn_id", name="pk_side_samples"),
        _of_turn("side_samples"),
    )


def downgrade() -> None:
    """Drop what `upgrade` added, with what it holds."""
    for table in ("side_samples", "routed_experts"):
        op.drop_table(table)
    for table, columns in _ADDED.items():
        for column in columns:
            op.drop_column(table, column)


def _of_turn(table: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(["turn_id"], ["turns.turn_id"], name=f"fk_{table}_turn_id")
