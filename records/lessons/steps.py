"""The lessons of a batch: leased, given back, trained, reconciled with the chain of checkpoints.

Each function is part of an operation on turns (records/training/training.py,
records/training/reconcile.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, func, insert, or_, select, update

from records.errors import StoreConflict
from records.lessons.dropping import drop_where, erase
from records.lessons.names import LessonDrop, LessonKind, LessonState
from records.lessons.rows import LessonRow, LessonSampleRow
from records.tables.sql import chunks, table_of
from records.training.step_results import SampleResult


def num_ready(connection: Connection, now: float) -> int:
    """Number of lessons that wait for a trainer, or that a trainer did not give back in time."""
    expired = and_(LessonRow.state == LessonState.LEASED, LessonRow.claim_until < now)
    statement = select(func.count()).where(or_(LessonRow.state == LessonState.READY, expired))
    return connection.scalar(statement) or 0


def lease(
    connection: Connection, lesson_ids: Sequence[str], owner: str, now: float, ttl_s: float
) -> None:
    """ready -> leased, of lessons that the caller chose and locked."""
    for part in chunks(lesson_ids):
        connection.execute(
            update(LessonRow)
            .where(LessonRow.lesson_id.in_(part))
            .values(
                state=LessonState.LEASED,
                claim_owner=owner,
                claim_until=now + ttl_s,
                updated_at=now,
            )
        )


def extend(connection: Connection, owner: str, until: float) -> int:
    """Hold all leases of `owner` until `until`; returns how many."""
    return connection.execute(
        update(LessonRow)
        .where(LessonRow.state == LessonState.LEASED, LessonRow.claim_owner == owner)
        .values(claim_until=until)
    ).rowcount


def give_back(connection: Connection, now: float, *conditions: ColumnElement[bool]) -> int:
    """leased -> ready, or dropped if that was asked for meanwhile; returns how many."""
    leased = (LessonRow.state == LessonState.LEASED, *conditions)
    dropped = 0
    reasons = select(LessonRow.drop_reason).where(*leased, LessonRow.drop_reason.is_not(None))
    for reason in connection.scalars(reasons.distinct()).all():
        assert reason is not None
        dropped += drop_where(connection, reason, now, *leased, LessonRow.drop_reason == reason)
    returned = connection.execute(
        update(LessonRow)
        .where(*leased)
        .values(state=LessonState.READY, claim_owner=None, claim_until=None, updated_at=now)
    ).rowcount
    return dropped + returned


def train(
    connection: Connection, version: int, results: Sequence[SampleResult], now: float
) -> None:
    """leased -> trained, with what the step made of each. Raises StoreConflict for one that is not
    leased.
    """
    if results:
        mark_trained(connection, version, [result.turn_id for result in results], now)
        connection.execute(
            insert(table_of(LessonSampleRow)), [_sample_row(one, version, now) for one in results]
        )


def mark_trained(
    connection: Connection,
    version: int,
    lesson_ids: Sequence[str],
    now: float,
    *conditions: ColumnElement[bool],
) -> None:
    """leased -> trained. Raises StoreConflict for one that is not leased, or does not meet the
    conditions.
    """
    forgotten = [
        lesson_id
        for part in chunks(lesson_ids)
        for lesson_id in connection.scalars(
            select(LessonRow.lesson_id).where(
                LessonRow.lesson_id.in_(part), LessonRow.drop_reason == LessonDrop.FORGOTTEN
            )
        )
    ]
    num_trained = sum(
        connection.execute(
            update(LessonRow)
            .where(
                LessonRow.lesson_id.in_(part),
                LessonRow.state == LessonState.LEASED,
                *conditions,
            )
            .values(**_trained(version, now))
        ).rowcount
        for part in chunks(lesson_ids)
    )
    if num_trained != len(lesson_ids):
        raise StoreConflict(
            f"step {version} trained {len(lesson_ids)} lessons, but only {num_trained} of them "
            "are leased"
        )
    erase(connection, forgotten)  # its text was deleted during the step


def hints_of(connection: Connection, lesson_ids: Sequence[str]) -> set[str]:
    """The hints that these lessons teach; their counter-lessons teach none."""
    found: set[str] = set()
    for part in chunks(lesson_ids):
        statement = select(LessonRow.hint_id).where(
            LessonRow.lesson_id.in_(part), LessonRow.kind == LessonKind.HINT
        )
        found.update(one for one in connection.scalars(statement.distinct()) if one is not None)
    return found


def _trained(version: int, now: float) -> dict[str, Any]:
    return {
        "state": LessonState.TRAINED,
        "drop_reason": None,
        "drop_detail": None,
        "trained_version": version,
        "claim_owner": None,
        "claim_until": None,
        "updated_at": now,
    }


def _sample_row(result: SampleResult, version: int, now: float) -> dict[str, Any]:
    return {
        "lesson_id": result.turn_id,
        "version": version,
        "staleness": result.staleness,
        "advantage_mean": result.advantage_mean,
        "advantage_abs_max": result.advantage_abs_max,
        "advantages": result.advantages,
        "created_at": now,
    }


def trained(connection: Connection, since: int | None = None) -> dict[str, int]:
    """Lesson id -> the version that trained it, of those after `since` (None: of all)."""
    statement = select(LessonRow.lesson_id, LessonRow.trained_version, LessonRow.state)
    # With a condition on the state too, SQLite reads all trained lessons.
    if since is None:
        among = and_(LessonRow.state == LessonState.TRAINED, LessonRow.trained_version.is_not(None))
    else:
        among = LessonRow.trained_version > since
    return {
        row.lesson_id: row.trained_version
        for row in connection.execute(statement.where(among))
        if row.state is LessonState.TRAINED and row.trained_version
    }


def trained_by(connection: Connection, lesson_ids: Sequence[str], version: int) -> bool:
    """Whether one of these lessons was trained by this version or an older one."""
    found = select(LessonRow.lesson_id).where(
        LessonRow.state == LessonState.TRAINED, LessonRow.trained_version <= version
    )
    return any(
        connection.scalar(found.where(LessonRow.lesson_id.in_(part)).limit(1)) is not None
        for part in chunks(lesson_ids)
    )


def reconcile(
    connection: Connection, lost: Sequence[str], differing: Mapping[str, int], now: float
) -> tuple[int, list[str]]:
    """Drop `lost` lessons and mark `differing` ones (id -> version) as trained; returns (number
    marked, ids that are not in this store).

    What only lost checkpoints trained is stale: the policy has to be sampled again there.
    """
    for part in chunks(lost):
        drop_where(connection, LessonDrop.STALE, now, LessonRow.lesson_id.in_(part))
    unknown, marked = [], 0
    for lesson_id, version in differing.items():
        changed = connection.execute(
            update(LessonRow)
            .where(LessonRow.lesson_id == lesson_id)
            .values(**_trained(version, now))
        ).rowcount
        marked += changed
        if not changed:
            unknown.append(lesson_id)
    return marked, unknown
