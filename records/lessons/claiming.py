"""What the rehearsal worker does with lessons: add them, claim them, store their results.

A claim is an owner and a deadline, as for turns (records/queue/claims.py). Dropping a lesson erases
its tokens and score: nobody trains on it any more, and its row says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, insert, or_, select, update

from records.care.deletion import admit_writer
from records.lessons.dropping import UNTRAINED, drop_where
from records.lessons.names import LessonDrop, LessonState
from records.lessons.rows import LessonRow, LessonScoreRow, LessonTokensRow
from records.lessons.types import NewLesson
from records.names import DropReason
from records.queue.round_robin import Taken, ceil_div, deal, ring_of_scopes
from records.tables.models import TurnRow
from records.tables.sql import chunks, table_of

CLAIMABLE = (LessonState.SAMPLING, LessonState.SCORING)
UNFINISHED = (*UNTRAINED, LessonState.LEASED)


def add_op(connection: Connection, lessons: Sequence[NewLesson], now: float) -> int:
    """Insert lessons, in `sampling`; returns how many. One whose turn was forgotten meanwhile is
    left out.
    """
    admit_writer(connection)
    known: set[str] = set()
    for part in chunks(sorted({one.state_turn_id for one in lessons})):
        statement = select(TurnRow.turn_id).where(
            TurnRow.turn_id.in_(part),
            or_(TurnRow.drop_reason.is_(None), TurnRow.drop_reason != DropReason.FORGOTTEN),
        )
        known.update(connection.scalars(statement))
    rows = [_new_row(one, now) for one in lessons if one.state_turn_id in known]
    if rows:
        connection.execute(insert(table_of(LessonRow)), rows)
    return len(rows)


def _new_row(lesson: NewLesson, now: float) -> dict[str, Any]:
    return {
        "lesson_id": lesson.lesson_id,
        "kind": lesson.kind,
        "scope": lesson.scope,
        "hint_id": lesson.hint_id,
        "state_turn_id": lesson.state_turn_id,
        "prompt_id": lesson.prompt_id,
        "state": LessonState.SAMPLING,
        "created_at": now,
        "updated_at": now,
    }


def any_free(connection: Connection, state: LessonState, now: float) -> bool:
    """Whether a claim would find a lesson: idle workers ask this without taking a write lock."""
    statement = select(LessonRow.lesson_id).where(LessonRow.state == state, _is_free(now)).limit(1)
    return connection.scalar(statement) is not None


def _is_free(now: float, row: Any = LessonRow) -> ColumnElement[bool]:
    return or_(row.claim_until.is_(None), row.claim_until < now)


def claim_op(
    connection: Connection,
    state: LessonState,
    owner: str,
    limit: int,
    now: float,
    ttl_s: float,
    after: str = "",
) -> Taken:
    """Claim up to `limit` lessons of `state`: round robin by scope, starting after the scope
    `after`, the oldest of each scope first.
    """
    scopes = ring_of_scopes(
        connection, LessonRow, lambda row: [row.state == state, _is_free(now, row)], after, limit
    )
    depth = ceil_div(limit, max(len(scopes), 1))
    queues = [_oldest(connection, state, scope, now, depth) for scope in scopes]
    if sum(map(len, queues)) < limit:  # some have less than their part: the others fill up
        queues = [_oldest(connection, state, scope, now, limit) for scope in scopes]
    chosen = deal(queues, limit)
    for part in chunks([lesson_id for lesson_id, _ in chosen]):
        connection.execute(
            update(LessonRow)
            .where(LessonRow.lesson_id.in_(part))
            .values(claim_owner=owner, claim_until=now + ttl_s)
        )
    return Taken(
        lesson_ids=[lesson_id for lesson_id, _ in chosen],
        last_scope=chosen[-1][1] if chosen else after,
    )


def _oldest(
    connection: Connection, state: LessonState, scope: str, now: float, depth: int
) -> list[tuple[str, str]]:
    """(lesson id, scope) of the oldest free lessons of a scope."""
    statement = (
        select(LessonRow.lesson_id)
        .where(LessonRow.state == state, LessonRow.scope == scope, _is_free(now))
        .order_by(LessonRow.created_at, LessonRow.lesson_id)
        .limit(depth)
        .with_for_update(skip_locked=True)
    )
    return [(lesson_id, scope) for lesson_id in connection.scalars(statement)]


def extend_op(connection: Connection, owner: str, lesson_ids: Sequence[str], until: float) -> int:
    """Move the deadline of claims that `owner` still holds; returns how many."""
    return _update_held(connection, owner, lesson_ids, claim_until=until)


def release_op(connection: Connection, owner: str, lesson_ids: Sequence[str]) -> int:
    """Give back claims that `owner` still holds; returns how many."""
    return _update_held(connection, owner, lesson_ids, claim_owner=None, claim_until=None)


def _update_held(
    connection: Connection, owner: str, lesson_ids: Sequence[str], **values: Any
) -> int:
    return sum(
        connection.execute(
            update(LessonRow)
            .where(
                LessonRow.lesson_id.in_(part),
                LessonRow.claim_owner == owner,
                LessonRow.state.in_(CLAIMABLE),
            )
            .values(**values)
        ).rowcount
        for part in chunks(lesson_ids)
    )


def sample_op(
    connection: Connection,
    owner: str,
    tokens: dict[str, Any],
    versions: tuple[int, int],
    now: float,
) -> bool:
    """sampling -> scoring, with the row of its tokens; `versions` are the oldest and the newest
    that sampled any. False for a lost claim.
    """
    moved = _move(
        connection,
        owner,
        tokens["lesson_id"],
        (LessonState.SAMPLING, LessonState.SCORING),
        now,
        oldest_version=versions[0],
        newest_version=versions[1],
    )
    if moved:
        connection.execute(insert(table_of(LessonTokensRow)), tokens)
    return moved


def score_op(connection: Connection, owner: str, score: dict[str, Any], now: float) -> bool:
    """scoring -> ready, with the row of its score. False for a lost claim."""
    step = (LessonState.SCORING, LessonState.READY)
    moved = _move(connection, owner, score["lesson_id"], step, now)
    if moved:
        connection.execute(insert(table_of(LessonScoreRow)), score)
    return moved


def _move(
    connection: Connection,
    owner: str,
    lesson_id: str,
    step: tuple[LessonState, LessonState],
    now: float,
    **values: Any,
) -> bool:
    changed = connection.execute(
        update(LessonRow)
        .where(
            LessonRow.lesson_id == lesson_id,
            LessonRow.claim_owner == owner,
            LessonRow.state == step[0],
        )
        .values(state=step[1], claim_owner=None, claim_until=None, updated_at=now, **values)
    )
    return changed.rowcount == 1


def drop_op(
    connection: Connection, owner: str, lesson_id: str, reason: LessonDrop, detail: str, now: float
) -> bool:
    """sampling, scoring or leased -> dropped(reason); False if it is not held by `owner`."""
    held = (
        LessonRow.lesson_id == lesson_id,
        LessonRow.claim_owner == owner,
        LessonRow.state.in_((*CLAIMABLE, LessonState.LEASED)),
    )
    return drop_where(connection, reason, now, *held, detail=detail) == 1


def expire_op(connection: Connection, oldest_allowed: int, now: float) -> int:
    """Sampled lessons with tokens of a version before `oldest_allowed` -> dropped(stale)."""
    return drop_where(
        connection,
        LessonDrop.STALE,
        now,
        LessonRow.state.in_((LessonState.SCORING, LessonState.READY)),
        LessonRow.oldest_version < oldest_allowed,
    )
