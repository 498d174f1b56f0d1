"""Lessons that end before they are trained on, with a reason; nothing else of them stays."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Connection, delete, or_, select, update

from records.lessons.names import LessonDrop, LessonKind, LessonState
from records.lessons.rows import LessonRow, LessonScoreRow, LessonTokensRow
from records.tables.sql import chunks

UNTRAINED = (LessonState.SAMPLING, LessonState.SCORING, LessonState.READY)
"""States in which anybody may drop a lesson: it has not trained, and is not being trained on."""


def drop_of_hint_op(connection: Connection, hint_id: str, reason: LessonDrop, now: float) -> int:
    """All lessons of a hint that are not being trained on -> dropped(reason); returns how many.
    Those of a batch that is being trained on are dropped if it is given back.
    """
    of_hint = LessonRow.hint_id == hint_id
    drop_if_given_back(connection, reason, of_hint)
    return drop_where(connection, reason, now, of_hint, LessonRow.state.in_(UNTRAINED))


def drop_held_op(connection: Connection, now: float) -> int:
    """Lessons that hold what hints taught, and are not being trained on -> dropped(stale)."""
    return drop_where(
        connection,
        LessonDrop.STALE,
        now,
        LessonRow.kind == LessonKind.KEEP,
        LessonRow.hint_id.is_not(None),
        LessonRow.state.in_(UNTRAINED),
    )


def drop_if_given_back(
    connection: Connection, reason: LessonDrop, *conditions: ColumnElement[bool]
) -> None:
    """Keep leased lessons from becoming ready again. Those to be forgotten keep that reason."""
    stays = LessonRow.drop_reason == LessonDrop.FORGOTTEN
    connection.execute(
        update(LessonRow)
        .where(
            *conditions,
            LessonRow.state == LessonState.LEASED,
            or_(LessonRow.drop_reason.is_(None), ~stays),
        )
        .values(drop_reason=reason)
    )


def drop_where(
    connection: Connection,
    reason: LessonDrop,
    now: float,
    *conditions: ColumnElement[bool],
    detail: str = "",
) -> int:
    """Lessons -> dropped(reason), without tokens and scores; returns how many."""
    statement = select(LessonRow.lesson_id).where(*conditions)
    lesson_ids = list(connection.scalars(statement.order_by(LessonRow.lesson_id).with_for_update()))
    for part in chunks(lesson_ids):
        connection.execute(
            update(LessonRow)
            .where(LessonRow.lesson_id.in_(part))
            .values(
                state=LessonState.DROPPED,
                drop_reason=reason,
                drop_detail=detail or None,
                claim_owner=None,
                claim_until=None,
                trained_version=None,
                updated_at=now,
            )
        )
    erase(connection, lesson_ids)
    return len(lesson_ids)


def erase(connection: Connection, lesson_ids: Sequence[str]) -> None:
    """Erase what was sampled and scored in these lessons."""
    for part in chunks(lesson_ids):
        for model in (LessonScoreRow, LessonTokensRow):
            connection.execute(delete(model).where(model.lesson_id.in_(part)))


def erase_of_hint(connection: Connection, hint_id: str, now: float) -> None:
    """Forget a hint's text: its lessons are dropped, and trained ones keep what training did, but
    not what was read and said. One that is being trained on is erased when its step is committed.
    """
    drop_of_hint_op(connection, hint_id, LessonDrop.FORGOTTEN, now)
    of_hint = select(LessonRow.lesson_id).where(
        LessonRow.hint_id == hint_id, LessonRow.state == LessonState.TRAINED
    )
    for model in (LessonScoreRow, LessonTokensRow):
        connection.execute(delete(model).where(model.lesson_id.in_(of_hint)))
