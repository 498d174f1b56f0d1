"""Totals of turns, votes, verdicts and scores, kept by triggers.

`records/tables/totals.py` says what the rows mean. A later migration that makes one of these tables
anew must make its triggers anew.
"""

from __future__ import annotations

from typing import NamedTuple

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None

_SUMS = ("num_rows", "num_first", "sum_first", "num_second", "sum_second")
_FOLD_EVERY = 512
"""PostgreSQL: changes between two times that rows are added up."""
_SEEN = {"insert": {"new": 1}, "update": {"old": -1, "new": 1}, "delete": {"old": -1}}
"""PostgreSQL: the rows that an event shows to its trigger, and what each adds."""
_FOLDING_LOCK = 7_203_115_064_981_239


class _Counted(NamedTuple):
    """A table whose rows are counted: SQL of a row `{r}`, and the columns that it reads."""

    table: str
    name: str
    columns: tuple[str, ...]
    first: str = "CAST(NULL AS BIGINT)"
    second: str = "CAST(NULL AS BIGINT)"

    def sums(self, row: str) -> list[str]:
        """What this row adds to each of `_SUMS`."""
        first, second = self.first.format(r=row), self.second.format(r=row)
        added = ["1"]
        for value in (first, second):
            added += [f"CASE WHEN {value} IS NULL THEN 0 ELSE 1 END", f"coalesce({value}, 0)"]
        return added


_COUNTED = (
    _Counted(
        table="turns",
        name="'turn:' || {r}.state || ':' || coalesce({r}.drop_reason, '') || ':' || {r}.priority",
        columns=("state", "drop_reason", "priority"),
    ),
    _Counted(
        table="votes",
        name="'vote:' || coalesce(CAST({r}.score AS TEXT), 'none')",
        columns=("score", "prompt_tokens", "completion_tokens"),
        first="{r}.prompt_tokens",
        second="{r}.completion_tokens",
    ),
    _Counted(table="verdicts", name="'verdict'", columns=("hint",), first="length({r}.hint)"),
    _Counted(
        table="scores",
        name="CASE WHEN {r}.teacher_version = '' THEN 'unscored' ELSE 'score' END",
        columns=("teacher_version", "latency_s"),
        first="CAST(round({r}.latency_s * 1000000.0) AS BIGINT)",
    ),
)


def upgrade() -> None:
    """Add the table and the triggers, and count what is there."""
    op.create_table(
        "totals",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in _SUMS),
        sa.PrimaryKeyConstraint("name", "number", name="pk_totals"),
    )
    is_sqlite = op.get_bind().dialect.name == "sqlite"
    if not is_sqlite:
        # Writers end first and the others wait, so that the count below misses nothing.
        op.execute(f"LOCK TABLE {', '.join(one.table for one in _COUNTED)} IN SHARE MODE")
        _fold_on_postgresql()
    for one in _COUNTED:
        for statement in _on_sqlite(one) if is_sqlite else _on_postgresql(one):
            op.execute(sa.text(_escaped(statement)))
        op.execute(sa.text(_escaped(_count(one))))


def downgrade() -> None:
    """Drop both."""
    is_sqlite = op.get_bind().dialect.name == "sqlite"
    for one in _COUNTED:
        for event in _SEEN:
            name = f"totals_of_{one.table}_{event}"
            if is_sqlite:
                op.execute(f"DROP TRIGGER {name}")
            else:
                op.execute(f"DROP FUNCTION {name}() CASCADE")
    if not is_sqlite:
        op.execute("DROP FUNCTION fold_totals()")
        op.execute("DROP SEQUENCE totals_number")
    op.drop_table("totals")


def _escaped(statement: str) -> str:
    return statement.replace(":", "\\:")


def _count(one: _Counted) -> str:
    """The total of each name, from all rows."""
    sums = ", ".join(f"sum({value})" for value in one.sums("r"))
    return (
        f"INSERT INTO totals(name, number, {', '.join(_SUMS)}) "
        f"SELECT {one.name.format(r='r')}, 0, {sums} FROM {one.table} AS r GROUP BY 1"
    )


def _on_sqlite(one: _Counted) -> list[str]:
    """One row for each name, changed in place: there is one writer at a time."""
    before, after = _add(one, "OLD", "-"), _add(one, "NEW", "+")
    differs = " OR ".join(f"OLD.{name} IS NOT NEW.{name}" for name in one.columns)
    events = {
        "insert": (f"INSERT ON {one.table}", after),
        "update": (
            f"UPDATE OF {', '.join(one.columns)} ON {one.table} WHEN {differs}",
            f"{before} {after}",
        ),
        "delete": (f"DELETE ON {one.table}", before),
    }
    return [
        f"CREATE TRIGGER totals_of_{one.table}_{event} AFTER {when} BEGIN {work} END"
        for event, (when, work) in events.items()
    ]


def _add(one: _Counted, row: str, sign: str) -> str:
    values = ", ".join(f"{sign}({value})" for value in one.sums(row))
    added = ", ".join(f"{name} = {name} + excluded.{name}" for name in _SUMS)
    return (
        f"INSERT INTO totals(name, number, {', '.join(_SUMS)}) "
        f"VALUES ({one.name.format(r=row)}, 0, {values}) "
        f"ON CONFLICT (name, number) DO UPDATE SET {added};"
    )


def _on_postgresql(one: _Counted) -> list[str]:
    """Rows are only added, so that no writer waits for another: each statement adds what it
    changed, under a number of its own.
    """
    made = []
    for event, rows in _SEEN.items():
        name = f"totals_of_{one.table}_{event}"
        seen = " ".join(f"{which.upper()} TABLE AS {which}_rows" for which in rows)
        made += [
            # No statement has a parameter: each is planned once in a session.
            f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            f"PERFORM nextval('totals_number'); {_change(one, rows)} "
            f"IF currval('totals_number') % {_FOLD_EVERY} = 0 THEN PERFORM fold_totals(); END IF; "
            "RETURN NULL; END $$",
            f"CREATE TRIGGER {name} AFTER {event.upper()} ON {one.table} "
            f"REFERENCING {seen} FOR EACH STATEMENT EXECUTE FUNCTION {name}()",
        ]
    return made


def _change(one: _Counted, rows: dict[str, int]) -> str:
    parts = [
        f"SELECT {one.name.format(r='r')} AS name, "
        + ", ".join(
            f"{sign} * {value} AS {name}" for name, value in zip(_SUMS, one.sums("r"), strict=True)
        )
        + f" FROM {which}_rows AS r"
        for which, sign in rows.items()
    ]
    return _insert_sums(" UNION ALL ".join(parts))


def _insert_sums(rows: str) -> str:
    sums = [f"sum({name})" for name in _SUMS]
    return (
        f"INSERT INTO totals(name, number, {', '.join(_SUMS)}) "
        f"SELECT name, currval('totals_number'), {', '.join(sums)} FROM ({rows}) AS changed "
        f"GROUP BY name HAVING {' OR '.join(f'{one} <> 0' for one in sums)};"
    )


def _fold_on_postgresql() -> None:
    """A function that adds rows up, unless another process is doing that."""
    op.execute("CREATE SEQUENCE totals_number")
    # Reading is frequent and short: a lock that keeps readers out is worth no disk space.
    op.execute("ALTER TABLE totals SET (vacuum_truncate = false)")
    fold = _insert_sums("SELECT * FROM gone").replace(
        "INSERT", "WITH gone AS (DELETE FROM totals RETURNING *) INSERT", 1
    )
    op.execute(
        "CREATE FUNCTION fold_totals() RETURNS void LANGUAGE plpgsql AS $$ BEGIN "
        f"IF pg_try_advisory_xact_lock({_FOLDING_LOCK}) THEN "
        f"PERFORM nextval('totals_number'); {fold} END IF; END $$"
    )
