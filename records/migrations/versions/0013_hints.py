"""The hint memory: hints, the turns that they came from, words and states for their lessons."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the tables. Verdicts of before stay verdicts: what they taught is not remembered."""
    op.create_table(
        "hints",
        sa.Column("hint_id", sa.Text(), nullable=False),
        sa.Column("scope", sa.Text(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("text_key", sa.Text(), nullable=True),
        sa.Column("origin_turn_id", sa.Text(), nullable=True),
        sa.Column("status", sa.String(length=32), nullable=False),
        sa.Column("detail", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.Column("claim_owner", sa.Text(), nullable=True),
        sa.Column("claim_until", sa.Double(), nullable=True),
        sa.Column("is_rule", sa.Boolean(), nullable=True),
        sa.Column("block", sa.String(length=32), nullable=True),
        sa.Column("opposed_by", sa.Text(), nullable=True),
        sa.Column("merged_into", sa.Text(), nullable=True),
        sa.Column("first_gap", sa.Double(), nullable=True),
        sa.Column("gap", sa.Double(), nullable=True),
        sa.Column("gap_high", sa.Double(), nullable=True),
        sa.Column("trained_since", sa.BigInteger(), nullable=True),
        sa.Column("num_steps", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("hint_id", name="pk_hints"),
    )
    op.create_index("ix_hints_scope_text_key", "hints", ["scope", "text_key"], unique=True)
    op.create_index(
        "ix_hints_status_is_rule_scope_created_at",
        "hints",
        ["status", "is_rule", "scope", "created_at"],
    )
    op.create_index("ix_hints_created_at", "hints", ["created_at"])
    op.create_index("ix_hints_origin_turn_id", "hints", ["origin_turn_id"])
    op.create_table(
        "hint_sources",
        sa.Column("hint_id", sa.Text(), nullable=False),
        sa.Column("turn_id", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("words", sa.Text(), nullable=False),
        sa.Column("num_votes", sa.Integer(), nullable=False),
        sa.Column("num_positive", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("hint_id", "turn_id", name="pk_hint_sources"),
        sa.ForeignKeyConstraint(["hint_id"], ["hints.hint_id"], name="fk_hint_sources_hint_id"),
        sa.ForeignKeyConstraint(["turn_id"], ["turns.turn_id"], name="fk_hint_sources_turn_id"),
    )
    op.create_index("ix_hint_sources_turn_id", "hint_sources", ["turn_id"])
    op.create_table(
        "hint_prompts",
        sa.Column("prompt_id", sa.Text(), nullable=False),
        sa.Column("hint_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("held_out", sa.Boolean(), nullable=False),
        sa.Column("asked", sa.Integer(), nullable=False),
        sa.Column("followed", sa.Integer(), nullable=False),
        sa.Column("dropped", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("prompt_id", name="pk_hint_prompts"),
        sa.ForeignKeyConstraint(["hint_id"], ["hints.hint_id"], name="fk_hint_prompts_hint_id"),
    )
    op.create_index("ix_hint_prompts_hint_id", "hint_prompts", ["hint_id"])
    op.create_table(
        "hint_states",
        sa.Column("hint_id", sa.Text(), nullable=False),
        sa.Column("turn_id", sa.Text(), nullable=False),
        sa.Column("held_out", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("hint_id", "turn_id", name="pk_hint_states"),
        sa.ForeignKeyConstraint(["hint_id"], ["hints.hint_id"], name="fk_hint_states_hint_id"),
        sa.ForeignKeyConstraint(["turn_id"], ["turns.turn_id"], name="fk_hint_states_turn_id"),
    )
    op.create_index("ix_hint_states_turn_id", "hint_states", ["turn_id"])


def downgrade() -> None:
    """Drop the tables with what they hold."""
    for name in ("hint_states", "hint_prompts", "hint_sources", "hints"):
        op.drop_table(name)
