"""What turns were worth before they were answered: V(prompt), estimated by further answers.

The verifier judges each further answer as if the session had ended with it (ALGORITHMS 8.5). Values
are stored with the session's outcome, in one transaction.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, select

from records.names import TurnType
from records.outcomes.rows import TurnValueRow
from records.tables.models import TurnRow
from records.tables.sql import insert_missing, rows_in

MOST_TURNS = 64
"""Turns of one session that are valued: its last ones."""
_OF_SESSIONS = (
    select(TurnRow.session_id, TurnValueRow.turn_id, TurnValueRow.value)
    .join(TurnValueRow, TurnValueRow.turn_id == TurnRow.turn_id)
    .where(TurnRow.session_id.in_(bindparam("values", expanding=True)))
    .order_by(TurnRow.session_id, TurnRow.created_at, TurnRow.turn_id)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnValue:
    """`value` in [0, 1] is the mean outcome of `tries` further answers to a turn's prompt; None:
    there is no such answer. Raises ValueError for another number.
    """

    turn_id: str
    value: float | None
    tries: int

    def __post_init__(self) -> None:
        if (self.value is None) != (self.tries == 0):
            raise ValueError("a value is the mean of one try at least")
        if self.value is not None and not (math.isfinite(self.value) and 0 <= self.value <= 1):
            raise ValueError(f"a value is a number from 0 to 1, got {self.value!r}")


def conversation(connection: Connection, turn_id: str) -> list[str]:
    """The turns that led to this one, oldest first, with it; the last MOST_TURNS of them."""
    path: list[str] = []
    following: str | None = turn_id
    while following is not None and len(path) < MOST_TURNS:
        row = connection.execute(
            select(TurnRow.turn_id, TurnRow.parent_turn_id, TurnRow.turn_type).where(
                TurnRow.turn_id == following
            )
        ).one_or_none()
        if row is None:
            break
        if row.turn_type is TurnType.MAIN:
            path.append(row.turn_id)
        following = row.parent_turn_id
    return path[::-1]


def keep_values(connection: Connection, values: Sequence[TurnValue]) -> None:
    """Store values; those of turns that have one change nothing."""
    rows = [{"turn_id": one.turn_id, "value": one.value, "tries": one.tries} for one in values]
    insert_missing(connection, TurnValueRow, rows)


def values_of(
    connection: Connection, session_ids: Iterable[str]
) -> Mapping[str, tuple[tuple[str, float | None], ...]]:
    """(turn id, value) of each session's valued turns, in the order of its conversation."""
    found: dict[str, tuple[tuple[str, float | None], ...]] = {}
    for row in rows_in(connection, _OF_SESSIONS, session_ids):
        found[row.session_id] = (*found.get(row.session_id, ()), (row.turn_id, row.value))
    return found
