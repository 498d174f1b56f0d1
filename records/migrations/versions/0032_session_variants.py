"""Which sessions have which other forms of messages, so that forgetting one finds those that no
other has without reading all turns.

Triggers keep it: turns that a process of the earlier program records are in it, too.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None

_ADDED = "INSERT INTO session_variants(session_id, body_hash) SELECT {row}.session_id, form.value"
_NEW_ON_SQLITE = f"{_ADDED} FROM json_each({{row}}.variants) AS form WHERE true"
_NEW_ON_POSTGRESQL = f"{_ADDED} FROM json_each_text({{row}}.variants\\:\\:json) AS form"
_ONCE = "ON CONFLICT DO NOTHING"


def upgrade() -> None:
    """Add the table and the trigger, and the sessions that are there."""
    op.create_table(
        "session_variants",
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("body_hash", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("session_id", "body_hash", name="pk_session_variants"),
    )
    op.create_index("ix_session_variants_body_hash", "session_variants", ["body_hash"])
    if op.get_bind().dialect.name == "sqlite":
        new = _NEW_ON_SQLITE.format(row="NEW")
        op.execute(
            "CREATE TRIGGER variants_of_a_turn AFTER INSERT ON turns "
            f"WHEN NEW.variants IS NOT NULL BEGIN {new} {_ONCE}; END"
        )
        stored = _ADDED.format(row="turns") + " FROM turns, json_each(turns.variants) AS form"
    else:
        # Writers end first and the others wait, so that no turn is missed.
        op.execute("LOCK TABLE turns IN SHARE MODE")
        # In one order: two writers of a session wait for each other, and neither for both.
        new = _NEW_ON_POSTGRESQL.format(row="NEW") + " ORDER BY form.value"
        op.execute(
            "CREATE FUNCTION variants_of_a_turn() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            f"{new} {_ONCE}; RETURN NULL; END $$"
        )
        op.execute(
            "CREATE TRIGGER variants_of_a_turn AFTER INSERT ON turns FOR EACH ROW "
            "WHEN (NEW.variants IS NOT NULL) EXECUTE FUNCTION variants_of_a_turn()"
        )
        stored = _ADDED.format(row="turns") + (
            " FROM turns, json_each_text(turns.variants\\:\\:json) AS form"
        )
    op.execute(f"{stored} WHERE turns.variants IS NOT NULL {_ONCE}")


def downgrade() -> None:
    """Drop both."""
    if op.get_bind().dialect.name == "sqlite":
        op.execute("DROP TRIGGER variants_of_a_turn")
    else:
        op.execute("DROP FUNCTION variants_of_a_turn() CASCADE")
    op.drop_table("session_variants")
