"""SQLite's index of texts in parts, so that taking words out of it costs the same in any store."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None

_PART_NUMBERS = 16_384


def upgrade() -> None:
    """Move the index into parts. PostgreSQL's takes deleted words out by itself."""
    if op.get_bind().dialect.name != "sqlite":
        return
    op.create_table(
        "turn_words_parts",
        sa.Column("part", sa.Integer(), nullable=False),
        sa.Column("is_clean", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("part", name="pk_turn_words_parts"),
    )
    last = op.get_bind().execute(sa.text("SELECT max(rowid) FROM turn_words")).scalar() or 0
    for part in range(last // _PART_NUMBERS + 1):
        first = part * _PART_NUMBERS
        op.execute(f"CREATE VIRTUAL TABLE turn_words_{part} USING fts5(words)")
        op.execute(f"INSERT INTO turn_words_parts(part, is_clean) VALUES ({part}, 1)")
        op.execute(
            f"INSERT INTO turn_words_{part}(rowid, words) SELECT rowid, words FROM turn_words "
            f"WHERE rowid >= {first} AND rowid < {first + _PART_NUMBERS}"
        )
    # It may still have words of deleted turns.
    op.execute("PRAGMA secure_delete=ON")
    op.execute("DROP TABLE turn_words")


def downgrade() -> None:
    """Move the parts into one index."""
    if op.get_bind().dialect.name != "sqlite":
        return
    op.execute("CREATE VIRTUAL TABLE turn_words USING fts5(words)")
    for part in op.get_bind().scalars(sa.text("SELECT part FROM turn_words_parts")).all():
        op.execute(
            f"INSERT INTO turn_words(rowid, words) SELECT rowid, words FROM turn_words_{part}"
        )
        op.execute(f"DROP TABLE turn_words_{part}")
    op.drop_table("turn_words_parts")
