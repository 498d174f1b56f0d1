"""Search in the text of turns."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the tables; the turns of before wait to be indexed, oldest first."""
    op.create_table(
        "turn_texts",
        sa.Column(
            "number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True
        ),
        sa.Column("turn_id", sa.Text(), nullable=False),
        sa.Column("is_indexed", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_turn_texts"),
        sa.ForeignKeyConstraint(["turn_id"], ["turns.turn_id"], name="fk_turn_texts_turn_id"),
    )
    op.execute(
        "INSERT INTO turn_texts(turn_id, is_indexed) "
        "SELECT turn_id, false FROM turns ORDER BY created_at"
    )
    op.create_index("ix_turn_texts_turn_id", "turn_texts", ["turn_id"], unique=True)
    op.create_index(
        "ix_turn_texts_waiting",
        "turn_texts",
        ["number"],
        sqlite_where=sa.text("NOT is_indexed"),
        postgresql_where=sa.text("NOT is_indexed"),
    )
    if op.get_bind().dialect.name == "sqlite":
        op.execute("CREATE VIRTUAL TABLE turn_words USING fts5(words)")
    else:
        op.execute("CREATE TABLE turn_words (number BIGINT PRIMARY KEY, words TSVECTOR NOT NULL)")
        op.execute("CREATE INDEX ix_turn_words_words ON turn_words USING gin (words)")


def downgrade() -> None:
    """Drop them with what they hold."""
    op.execute("DROP TABLE turn_words")
    op.drop_table("turn_texts")
