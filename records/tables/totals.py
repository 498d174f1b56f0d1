"""How many turns, votes, verdicts and scores a store has, without reading them.

Triggers of the database (migration 0027) change the totals in the transaction that changes a row,
whichever code changes it: they are exact at every moment that a reader sees. Rows with one name add
up. On SQLite a name has one row; on PostgreSQL each statement adds rows of its own, so that no
writer waits for another, and every 512th one puts all rows together.

It knows how the rows are counted, not what the numbers are for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from typing import Any

from sqlalchemy import BigInteger, Connection, Text, cast, func, select
from sqlalchemy.orm import Mapped, mapped_column

from records.names import DropReason, TurnState
from records.tables.models import Base

_COUNTINGS = (
    "SELECT 'turn:' || state || ':' || coalesce(drop_reason, '') || ':' || priority, "
    "count(*), 0, 0, 0, 0 FROM turns GROUP BY 1",
    "SELECT 'vote:' || coalesce(CAST(score AS TEXT), 'none'), count(*), count(prompt_tokens), "
    "coalesce(sum(prompt_tokens), 0), count(completion_tokens), "
    "coalesce(sum(completion_tokens), 0) FROM votes GROUP BY 1",
    "SELECT 'verdict', count(*), count(hint), coalesce(sum(length(hint)), 0), 0, 0 FROM verdicts",
    "SELECT CASE WHEN teacher_version = '' THEN 'unscored' ELSE 'score' END, count(*), "
    "count(latency_s), coalesce(sum(CAST(round(latency_s * 1000000.0) AS BIGINT)), 0), 0, 0 "
    "FROM scores GROUP BY 1",
)
"""The totals as the rows say them: SQL of both databases, each row a name and its numbers."""


class TotalRow(Base):
    """A part of the total of a name. `num_first` rows have a first amount, which add up to
    `sum_first`; the same for the second.

    | name | rows | first amount | second amount |
    |---|---|---|---|
    | `turn:STATE:DROP_REASON:PRIORITY` | turns | | |
    | `vote:SCORE` or `vote:none` | votes | prompt tokens | completion tokens |
    | `verdict` | verdicts | characters of the hint | |
    | `score` | scores of a teacher | its latency, µs | |
    | `unscored` | scores that no engine gave | the same | |
    """

    __tablename__ = "totals"
    name: Mapped[str] = mapped_column(Text, primary_key=True)
    number: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    num_rows: Mapped[int] = mapped_column(BigInteger)
    num_first: Mapped[int] = mapped_column(BigInteger)
    sum_first: Mapped[int] = mapped_column(BigInteger)
    num_second: Mapped[int] = mapped_column(BigInteger)
    sum_second: Mapped[int] = mapped_column(BigInteger)


@dataclass(frozen=True, slots=True)
class Total:
    """The numbers of one name; see `TotalRow`."""

    num_rows: int = 0
    num_first: int = 0
    sum_first: int = 0
    num_second: int = 0
    sum_second: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTotal:
    """Number of turns of one state, drop reason and priority."""

    state: TurnState
    drop_reason: DropReason | None
    priority: int
    number: int


def totals(connection: Connection) -> dict[str, Total]:
    """The total of each name that has any rows."""
    columns = [
        cast(func.sum(column), BigInteger)
        for column in (
            *(TotalRow.num_rows, TotalRow.num_first, TotalRow.sum_first),
            *(TotalRow.num_second, TotalRow.sum_second),
        )
    ]
    statement = select(TotalRow.name, *columns).group_by(TotalRow.name)
    return _by_name(connection.execute(statement))


def turn_totals(connection: Connection) -> list[TurnTotal]:
    """How many turns there are of each kind."""
    found = []
    for name, total in totals(connection).items():
        what, *parts = name.split(":")
        if what == "turn":
            state, reason, priority = parts
            found.append(
                TurnTotal(
                    state=TurnState(state),
                    drop_reason=DropReason(reason) if reason else None,
                    priority=int(priority),
                    number=total.num_rows,
                )
            )
    return found


def total_problems(connection: Connection) -> Iterator[str]:
    """Totals that are not what the rows add up to, which are all read."""
    kept, counted = totals(connection), {}
    for statement in _COUNTINGS:
        counted |= _by_name(connection.exec_driver_sql(statement))
    for name in sorted({*kept, *counted}):
        total, rows = kept.get(name, Total()), counted.get(name, Total())
        if total != rows:
            yield (
                f"the total of {name} is {_shown(total)}, but its rows add up to {_shown(rows)}: "
                "triggers of the database were off, or somebody changed it"
            )


def _by_name(rows: Iterable[Any]) -> dict[str, Total]:
    return {name: Total(*map(int, numbers)) for name, *numbers in rows if any(numbers)}


def _shown(total: Total) -> str:
    return " ".join(map(str, astuple(total)))
