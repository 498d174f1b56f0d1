"""How many turns wait, and since when: only turns on their way, however many have ended."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, func, select, true

from records.names import TurnState
from records.tables.models import TurnRow

QUEUES = (
    TurnState.AWAITING_NEXT_STATE,
    TurnState.JUDGING,
    TurnState.REVIEWING,
    TurnState.SCORING,
    TurnState.READY,
    TurnState.LEASED,
)
"""States in which turns are on their way, in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Turns in one state; the oldest was answered at `since` (unix seconds; None without any)."""

    turns: int
    since: float | None


def queues(connection: Connection, scope: str | None) -> dict[TurnState, Waiting]:
    """The turns of a scope (None: of all) in each state of QUEUES."""
    rows = connection.execute(
        select(TurnRow.state, func.count(), func.min(TurnRow.created_at))
        .where(TurnRow.state.in_(QUEUES), true() if scope is None else TurnRow.scope == scope)
        .group_by(TurnRow.state)
    )
    found = {state: Waiting(turns=number, since=since) for state, number, since in rows}
    return {state: found.get(state, Waiting(turns=0, since=None)) for state in QUEUES}
