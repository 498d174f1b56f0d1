"""Ending hints that no longer hold: what they had under way is dropped in the same transaction.

Lessons are dropped, and so are turns that only ended hints came from: nothing would preserve the
open wish for the opposite while they train. The states stay, because what was taught there has to
be unlearned (opd/rehearsal/preparing/keeping.py). If the hint is deleted, its texts and what a
judge wrote about it are deleted too.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Connection, and_, delete, exists, select, update

from records.hints.pausing import IS_UNGUARDED, lift
from records.hints.rows import HintPromptRow, HintRow, HintSourceRow
from records.hints.types import (
    ENDED_STATUSES,
    LIVE_STATUSES,
    DeletedHint,
    HintStatus,
)
from records.lessons.dropping import drop_of_hint_op, erase_of_hint
from records.lessons.names import LessonDrop
from records.lessons.rows import LessonRow, LessonSampleRow
from records.names import DropReason, TurnState
from records.queue.hintless import go_on_without_hint
from records.tables.models import (
    ReviewRow,
    SampleRow,
    ScoreRow,
    TurnRow,
    VerdictRow,
    VoteRow,
)
from records.tables.sql import chunks
from records.training.repeats import repeat_no_more

_WAITING = (TurnState.SCORING, TurnState.READY)
_AT_A_TIME = 500
_UNGUARDED = select(TurnRow.turn_id).where(
    TurnRow.state == TurnState.READY,
    exists().where(
        HintSourceRow.turn_id == TurnRow.turn_id,
        HintRow.hint_id == HintSourceRow.hint_id,
        IS_UNGUARDED,
    ),
    exists().where(VerdictRow.turn_id == TurnRow.turn_id, VerdictRow.hint.is_not(None)),
)


def only_ended() -> ColumnElement[bool]:
    """Whether a turn gave hints, none of which holds."""
    of_turn = (HintSourceRow.turn_id == TurnRow.turn_id, HintRow.hint_id == HintSourceRow.hint_id)
    return and_(
        exists().where(*of_turn, HintRow.status.in_(ENDED_STATUSES)),
        ~exists().where(*of_turn, HintRow.status.not_in(ENDED_STATUSES)),
    )


def stop(connection: Connection, hint_id: str, reason: LessonDrop, now: float) -> None:
    """Stop training on a hint that ended: drop its lessons and the turns that gave only ended
    hints. What is being trained on is dropped if it is given back.
    """
    drop_of_hint_op(connection, hint_id, reason, now)
    drop_turns(connection, now, TurnRow.state.in_(_WAITING), _came_from(hint_id))
    repeat_no_more(connection, _came_from(hint_id), only_ended())


def _came_from(hint_id: str) -> ColumnElement[bool]:
    return TurnRow.turn_id.in_(
        select(HintSourceRow.turn_id).where(HintSourceRow.hint_id == hint_id)
    )


def drop_turns(connection: Connection, now: float, *conditions: ColumnElement[bool]) -> int:
    """Those of these turns whose hints have all ended -> dropped(hint_ended), or ready with their
    reward alone; returns how many.
    """
    statement = select(TurnRow.turn_id).where(*conditions, only_ended())
    turn_ids = list(connection.scalars(statement.order_by(TurnRow.turn_id).with_for_update()))
    _drop_or_go_on(connection, turn_ids, DropReason.HINT_ENDED, now)
    erase_deleted(connection, turn_ids)
    return len(turn_ids)


def any_unguarded(connection: Connection) -> bool:
    """Whether a ready turn has a hint that nothing guards (`IS_UNGUARDED`)."""
    return connection.scalar(_UNGUARDED.limit(1)) is not None


def drop_unguarded_op(connection: Connection, now: float) -> int:
    """Ready turns with a hint that nothing guards -> dropped(hint_unguarded), or ready with their
    reward alone; returns how many, at most `_AT_A_TIME`.
    """
    found = _UNGUARDED.order_by(TurnRow.turn_id).limit(_AT_A_TIME).with_for_update()
    turn_ids = list(connection.scalars(found))
    _drop_or_go_on(connection, turn_ids, DropReason.HINT_UNGUARDED, now)
    return len(turn_ids)


def _drop_or_go_on(
    connection: Connection, turn_ids: Sequence[str], reason: DropReason, now: float
) -> None:
    going_on = go_on_without_hint(connection, turn_ids, now)
    for part in chunks([turn_id for turn_id in turn_ids if turn_id not in going_on]):
        connection.execute(
            update(TurnRow)
            .where(TurnRow.turn_id.in_(part))
            .values(
                state=TurnState.DROPPED,
                drop_reason=reason,
                trained_version=None,
                times_trained=0,
                times_left=0,
                claim_owner=None,
                claim_until=None,
                updated_at=now,
            )
        )


def erase_deleted(connection: Connection, turn_ids: Sequence[str]) -> None:
    """Erase what a teacher read of deleted hints from these turns, which are not in training."""
    for part in chunks(turn_ids):
        gone = (
            select(HintSourceRow.turn_id)
            .join(HintRow, HintRow.hint_id == HintSourceRow.hint_id)
            .where(HintSourceRow.turn_id.in_(part), HintRow.status == HintStatus.DELETED)
        )
        connection.execute(delete(ScoreRow).where(ScoreRow.turn_id.in_(gone)))


def contradict(connection: Connection, hint_id: str, scope: str, by: str, now: float) -> str | None:
    """Let a hint of the scope give way to another one; None if it already no longer holds."""
    status = _how_contradicted(connection, hint_id, by)
    changed = connection.execute(
        update(HintRow)
        .where(
            HintRow.hint_id == hint_id, HintRow.scope == scope, HintRow.status.in_(LIVE_STATUSES)
        )
        .values(status=status, opposed_by=by, text_key=None, block=None, updated_at=now)
    )
    if not changed.rowcount:
        return None
    stop(connection, hint_id, LessonDrop.HINT_ENDED, now)
    lift(connection, [hint_id], now)
    return hint_id


def _how_contradicted(connection: Connection, old: str, new: str) -> HintStatus:
    """Withdrawn if users of what the old hint had taught gave the new one; else contradicted."""
    taught = exists().where(
        HintRow.hint_id == old,
        HintRow.trained_since.is_not(None),
        HintSourceRow.hint_id == new,
        TurnRow.turn_id == HintSourceRow.turn_id,
        TurnRow.oldest_version >= HintRow.trained_since,
    )
    return HintStatus.WITHDRAWN if connection.scalar(select(taught)) else HintStatus.CONTRADICTED


def delete_hint_op(
    connection: Connection, hint_id: str, scope: str | None, now: float
) -> DeletedHint | None:
    """Delete a hint's texts, its sources' words and what was written about it on their turns; its
    row stays. None if there is no such hint (of the `scope`), or it was deleted before.
    """
    row = connection.execute(
        select(HintRow.scope, HintRow.status).where(HintRow.hint_id == hint_id).with_for_update()
    ).one_or_none()
    if row is None or scope not in (None, row.scope) or row.status is HintStatus.DELETED:
        return None
    merged = _merged_into(connection, [hint_id])
    versions = versions_of(connection, [hint_id, *merged])
    connection.execute(
        update(HintRow)
        .where(HintRow.hint_id == hint_id)
        .values(status=HintStatus.DELETED, text_key=None, updated_at=now)
    )
    stop(connection, hint_id, LessonDrop.FORGOTTEN, now)
    for one in (hint_id, *merged):
        erase_texts(connection, one, now)
    _erase_verdicts(connection, hint_id)
    connection.execute(
        update(HintSourceRow).where(HintSourceRow.hint_id == hint_id).values(text="", words="")
    )
    lift(connection, [hint_id], now)
    return DeletedHint(hint_id=hint_id, versions=versions)


def _merged_into(connection: Connection, hint_ids: Sequence[str]) -> list[str]:
    """Hints that were merged into these, also indirectly: their texts are deleted with these."""
    found: list[str] = []
    while hint_ids:
        hint_ids = [
            one
            for part in chunks(hint_ids)
            for one in connection.scalars(
                select(HintRow.hint_id).where(HintRow.merged_into.in_(part))
            )
            if one not in found
        ]
        found += hint_ids
    return found


def erase_texts(connection: Connection, hint_id: str, now: float) -> None:
    """Erase a hint's text and what was written from it: its exceptions' words, its lessons."""
    connection.execute(delete(HintPromptRow).where(HintPromptRow.hint_id == hint_id))
    erase_of_hint(connection, hint_id, now)
    connection.execute(
        update(HintRow).where(HintRow.hint_id == hint_id).values(text="", detail=None)
    )


def _erase_verdicts(connection: Connection, hint_id: str) -> None:
    """Erase a hint from the verdicts that gave it; that there was one, and the votes, stay."""
    turns = select(HintSourceRow.turn_id).where(HintSourceRow.hint_id == hint_id)
    leased = select(TurnRow.turn_id).where(TurnRow.state == TurnState.LEASED)
    connection.execute(
        update(VerdictRow)
        .where(VerdictRow.turn_id.in_(turns), VerdictRow.hint.is_not(None))
        .values(hint="", candidates=None)
    )
    connection.execute(update(VoteRow).where(VoteRow.turn_id.in_(turns)).values(hint="", text=""))
    connection.execute(
        update(ReviewRow)
        .where(ReviewRow.turn_id.in_(turns), ReviewRow.hint.is_not(None))
        .values(proposed="", hint="")
    )
    connection.execute(
        delete(ScoreRow).where(ScoreRow.turn_id.in_(turns), ScoreRow.turn_id.not_in(leased))
    )


def versions_of_lessons(connection: Connection, hint_ids: Sequence[str]) -> set[int]:
    """Versions that trained on lessons of these hints, lost ones included."""
    found: set[int | None] = set()
    for part in chunks(hint_ids):
        lessons = LessonRow.hint_id.in_(part)
        found.update(connection.scalars(select(LessonRow.trained_version).where(lessons)))
        sampled = select(LessonSampleRow.version).join(
            LessonRow, LessonRow.lesson_id == LessonSampleRow.lesson_id
        )
        found.update(connection.scalars(sampled.where(lessons)))
    return {version for version in found if version is not None}


def versions_of(connection: Connection, hint_ids: Sequence[str]) -> tuple[int, ...]:
    """Versions that trained on turns that these hints came from or on their lessons, lost ones
    included, and the first known version of each.
    """
    found: set[int | None] = {*versions_of_lessons(connection, hint_ids)}
    for part in chunks(hint_ids):
        sources = HintSourceRow.hint_id.in_(part)
        for statement in (
            select(HintRow.trained_since).where(HintRow.hint_id.in_(part)),
            select(TurnRow.trained_version)
            .join(HintSourceRow, HintSourceRow.turn_id == TurnRow.turn_id)
            .where(sources),
            select(SampleRow.version)
            .join(HintSourceRow, HintSourceRow.turn_id == SampleRow.turn_id)
            .where(sources),
        ):
            found.update(connection.scalars(statement.distinct()))
    return tuple(sorted(version for version in found if version is not None))
