"""Opposite hints of two scopes: they share one policy, so neither is rehearsed until somebody
decides, or until one of them no longer holds.

A paused hint names one of those that oppose it, though there may be more. So when that one ends, it
is not released but examined again: the examiner finds the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, and_, select, update

from records.hints.rows import HintRow
from records.hints.types import LIVE_STATUSES, RehearsalBlock
from records.lessons.dropping import drop_of_hint_op
from records.lessons.names import LessonDrop
from records.tables.sql import chunks

IS_PAUSED = and_(HintRow.block.is_not(None), HintRow.block == RehearsalBlock.OTHER_SCOPE)
"""A condition on a row of `hints`; never NULL, so that it can be negated."""
IS_UNGUARDED = and_(
    HintRow.block.is_not(None),
    HintRow.block.in_(
        (RehearsalBlock.NO_MAJORITY, RehearsalBlock.NOT_A_RULE, RehearsalBlock.UNCONFIRMED)
    ),
    HintRow.sessions_asked > 1,
)
"""Several sessions gave the hint, so that its turns teach it like a rule, and yet it is not
practised: nothing would preserve the open wish for the opposite.
"""


def pause(connection: Connection, hint_id: str, by: str, now: float) -> None:
    """Pause a hint that holds: one of another scope opposes it."""
    connection.execute(
        update(HintRow)
        .where(HintRow.hint_id == hint_id, HintRow.status.in_(LIVE_STATUSES))
        .values(block=RehearsalBlock.OTHER_SCOPE, opposed_by=by, updated_at=now)
    )
    drop_of_hint_op(connection, hint_id, LessonDrop.HINT_ENDED, now)


def lift(connection: Connection, ended: Sequence[str], now: float) -> None:
    """These hints no longer hold: hints that were paused because of them are examined again."""
    for part in chunks(ended):
        connection.execute(
            update(HintRow)
            .where(HintRow.opposed_by.in_(part), HintRow.status.in_(LIVE_STATUSES), IS_PAUSED)
            .values(opposed_by=None, block=None, is_rule=None, detail=None, updated_at=now)
        )


def hand_over(connection: Connection, merged: str, into: str, now: float) -> None:
    """A hint was merged: the one that has its sources now is opposed instead."""
    of_merged = and_(HintRow.opposed_by == merged, HintRow.status.in_(LIVE_STATUSES), IS_PAUSED)
    opponents = list(connection.scalars(select(HintRow.hint_id).where(of_merged)))
    connection.execute(update(HintRow).where(of_merged).values(opposed_by=into, updated_at=now))
    for opponent in opponents[:1]:
        pause(connection, into, opponent, now)


def still_live(connection: Connection, hint_ids: Sequence[str]) -> list[str]:
    """Those of these hints that hold, in the same order."""
    found: set[str] = set()
    for part in chunks(hint_ids):
        statement = select(HintRow.hint_id).where(
            HintRow.hint_id.in_(part), HintRow.status.in_(LIVE_STATUSES)
        )
        found.update(connection.scalars(statement))
    return [one for one in hint_ids if one in found]
