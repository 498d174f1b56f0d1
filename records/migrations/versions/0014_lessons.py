"""Lessons: what is sampled anew at recorded states, its tokens, its scores, what training did."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

_OF_A_LESSON = ("lesson_samples", "lesson_scores", "lesson_tokens")
_INDEXES = (
    ("ix_lessons_state_kind_scope_created_at", ["state", "kind", "scope", "created_at"]),
    ("ix_lessons_kind_updated_at", ["kind", "updated_at"]),
    ("ix_lessons_hint_id_created_at", ["hint_id", "created_at"]),
    ("ix_lessons_state_turn_id", ["state_turn_id"]),
    ("ix_lessons_trained_version", ["trained_version"]),
    ("ix_lessons_newest_version", ["newest_version"]),
)


def upgrade() -> None:
    """Add the tables."""
    op.create_table(
        "lessons",
        sa.Column("lesson_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("scope", sa.Text(), nullable=False),
        sa.Column("hint_id", sa.Text(), nullable=True),
        sa.Column("state_turn_id", sa.Text(), nullable=False),
        sa.Column("prompt_id", sa.Text(), nullable=True),
        sa.Column("state", sa.String(length=32), nullable=False),
        sa.Column("drop_reason", sa.String(length=32), nullable=True),
        sa.Column("drop_detail", sa.Text(), nullable=True),
        sa.Column("claim_owner", sa.Text(), nullable=True),
        sa.Column("claim_until", sa.Double(), nullable=True),
        sa.Column("oldest_version", sa.BigInteger(), nullable=True),
        sa.Column("newest_version", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.Column("trained_version", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("lesson_id", name="pk_lessons"),
        sa.ForeignKeyConstraint(
            ["state_turn_id"], ["turns.turn_id"], name="fk_lessons_state_turn_id"
        ),
        sa.ForeignKeyConstraint(
            ["trained_version"], ["policy_versions.version"], name="fk_lessons_trained_version"
        ),
    )
    for name, columns in _INDEXES:
        op.create_index(name, "lessons", columns)
    _create(
        "lesson_tokens",
        sa.Column("prefix_length", sa.Integer(), nullable=False),
        sa.Column("suffix_length", sa.Integer(), nullable=False),
        sa.Column("middle_ids", sa.LargeBinary(), nullable=False),
        sa.Column("response_ids", sa.LargeBinary(), nullable=False),
        sa.Column("rollout_logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("checksum", sa.LargeBinary(), nullable=False),
        sa.Column("version_spans", sa.Text(), nullable=False),
        sa.Column("sampling", sa.Text(), nullable=False),
        sa.Column("finish_reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("lesson_id", name="pk_lesson_tokens"),
    )
    _create(
        "lesson_scores",
        sa.Column("hint", sa.Text(), nullable=False),
        sa.Column("teacher", sa.Text(), nullable=False),
        sa.Column("teacher_version", sa.Text(), nullable=False),
        sa.Column("prefix_length", sa.Integer(), nullable=False),
        sa.Column("suffix_length", sa.Integer(), nullable=False),
        sa.Column("middle_ids", sa.LargeBinary(), nullable=False),
        sa.Column("teacher_logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("topk_ids", sa.LargeBinary(), nullable=True),
        sa.Column("topk_logprobs", sa.LargeBinary(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("lesson_id", name="pk_lesson_scores"),
    )
    _create(
        "lesson_samples",
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("staleness", sa.Integer(), nullable=False),
        sa.Column("advantage_mean", sa.Double(), nullable=False),
        sa.Column("advantage_abs_max", sa.Double(), nullable=False),
        sa.Column("advantages", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("lesson_id", "version", name="pk_lesson_samples"),
        sa.ForeignKeyConstraint(
            ["version"], ["policy_versions.version"], name="fk_lesson_samples_version"
        ),
    )


def downgrade() -> None:
    """Drop what `upgrade` added."""
    for table in (*_OF_A_LESSON, "lessons"):
        op.drop_table(table)


def _create(table: str, *parts: sa.schema.SchemaItem) -> None:
    """A table of what is made of a lesson."""
    op.create_table(
        table,
        sa.Column("lesson_id", sa.Text(), nullable=False),
        *parts,
        sa.ForeignKeyConstraint(["lesson_id"], ["lessons.lesson_id"], name=f"fk_{table}_lesson_id"),
    )
