"""Turns that have trained and may train again, on weights that have moved since (ALGORITHMS 6.11).

Such a turn stays `trained`: it is leased from that state and goes back to it, and `times_left` says
how often it may still be leased.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    and_,
    exists,
    func,
    literal_column,
    or_,
    select,
    update,
)
from sqlalchemy.orm import aliased

from records.names import TurnState
from records.tables.models import ScoreRow, TurnRow, VerdictRow


def has_score(row: type[TurnRow]) -> ColumnElement[bool]:
    """Whether a teacher has read the turn under its hint."""
    return exists().where(ScoreRow.turn_id == row.turn_id)


def is_taught(row: type[TurnRow]) -> ColumnElement[bool]:
    """Whether the turn still has a score or reward to train on: both may be deleted by now."""
    verdict = aliased(VerdictRow)
    rewarded = or_(verdict.reward.is_not(None), verdict.awaits_outcome)
    return or_(has_score(row), exists().where(verdict.turn_id == row.turn_id, rewarded))


def has_times_left(row: type[TurnRow]) -> ColumnElement[bool]:
    """Of turns that may train again. As text: their partial index is not used with a parameter."""
    return row.times_left > literal_column("0")


def trains_again(row: type[TurnRow]) -> list[ColumnElement[bool]]:
    """Of turns that have trained and may be leased once more."""
    return [has_times_left(row), row.state == TurnState.TRAINED, is_taught(row)]


def num_repeatable(connection: Connection) -> int:
    """How many turns may train again."""
    statement = select(func.count()).select_from(TurnRow)
    return connection.scalar(statement.where(*trains_again(TurnRow))) or 0


def repeat_no_more(connection: Connection, *conditions: ColumnElement[bool]) -> int:
    """Keep these trained turns from training again; returns how many might have."""
    changed = connection.execute(
        update(TurnRow).where(has_times_left(TurnRow), *conditions).values(times_left=0)
    )
    return changed.rowcount


def to_trained(
    connection: Connection, now: float, *conditions: ColumnElement[bool], ends: bool = False
) -> int:
    """Turns that are leased once more -> trained, as before; with `ends` they no longer train."""
    values: dict[str, Any] = {"state": TurnState.TRAINED, "claim_owner": None, "claim_until": None}
    if ends:
        values["times_left"] = 0
    changed = connection.execute(
        update(TurnRow)
        .where(
            and_(TurnRow.state == TurnState.LEASED, TurnRow.times_trained > 0),
            *conditions,
        )
        .values(**values, updated_at=now)
    )
    return changed.rowcount
