"""Lessons of deleted turns: they were sampled at what somebody wants forgotten."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Connection, delete, exists, select, update
from sqlalchemy.orm import InstrumentedAttribute

from records.lessons.names import LessonDrop, LessonState
from records.lessons.rows import OF_A_LESSON, LessonRow, LessonSampleRow
from records.tables.models import TurnRow
from records.tables.sql import chunks


def stop(connection: Connection, turn_ids: Sequence[str], now: float) -> list[str]:
    """Keep all stages from taking the lessons of these turns; returns the owners of those that are
    being trained on.
    """
    owners: set[str] = set()
    for part in chunks(turn_ids):
        of_turns = LessonRow.state_turn_id.in_(part)
        leased = select(LessonRow.claim_owner).where(
            of_turns, LessonRow.state == LessonState.LEASED
        )
        owners.update(owner or "unknown" for owner in connection.scalars(leased))
        connection.execute(
            update(LessonRow)
            .where(of_turns, LessonRow.state == LessonState.LEASED)
            .values(drop_reason=LessonDrop.FORGOTTEN)
        )
        kept = (LessonState.LEASED, LessonState.TRAINED, LessonState.DROPPED)
        connection.execute(
            update(LessonRow)
            .where(of_turns, LessonRow.state.not_in(kept))
            .values(
                state=LessonState.DROPPED,
                drop_reason=LessonDrop.FORGOTTEN,
                claim_owner=None,
                claim_until=None,
                updated_at=now,
            )
        )
    return sorted(owners)


def versions(connection: Connection, turn_ids: Sequence[str]) -> list[tuple[str, int]]:
    """(turn, version that trained on a lesson of it), lost versions included."""
    found: list[tuple[str, int]] = []
    for part in chunks(turn_ids):
        of_turns = LessonRow.state_turn_id.in_(part)
        sampled = (
            select(LessonRow.state_turn_id, LessonSampleRow.version)
            .join(LessonSampleRow, LessonSampleRow.lesson_id == LessonRow.lesson_id)
            .where(of_turns)
        )
        trained = select(LessonRow.state_turn_id, LessonRow.trained_version).where(
            of_turns, LessonRow.trained_version.is_not(None)
        )
        for statement in (sampled, trained):
            found += [(turn_id, number) for turn_id, number in connection.execute(statement)]
    return found


def delete_lessons(connection: Connection, turn_ids: Sequence[str]) -> int:
    """Delete the lessons of these turns with all that was made of them; returns how many."""
    num_deleted = 0
    for part in chunks(turn_ids):
        of_turns = select(LessonRow.lesson_id).where(LessonRow.state_turn_id.in_(part))
        for model in OF_A_LESSON:
            connection.execute(delete(model).where(model.lesson_id.in_(of_turns)))
        gone = delete(LessonRow).where(LessonRow.state_turn_id.in_(part))
        num_deleted += connection.execute(gone).rowcount
    return num_deleted


def is_leased(session_id: InstrumentedAttribute[str]) -> ColumnElement[bool]:
    """Whether a lesson of a turn of this session is being trained on."""
    return exists().where(
        LessonRow.state == LessonState.LEASED,
        TurnRow.turn_id == LessonRow.state_turn_id,
        TurnRow.session_id == session_id,
    )
