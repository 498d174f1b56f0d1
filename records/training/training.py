"""What the trainer does with turns and lessons: lease a batch, give it back, expire, commit a step.

A lease is a claim on `ready` turns and lessons, a whole batch or none. A step's turns, its lessons
and its policy version are written together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    and_,
    case,
    exists,
    func,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.orm import aliased

from records.errors import StoreConflict
from records.hints import ending
from records.hints import versions as hint_versions
from records.lessons import steps
from records.lessons.rows import LessonRow
from records.names import DropReason, TurnState
from records.outcomes.outcomes import alone
from records.outcomes.rows import has_outcome
from records.queue.round_robin import Condition, Taken
from records.tables.models import PolicyVersionRow, RecordingRow, SampleRow, TurnRow
from records.tables.sql import chunks
from records.training.batches import none_comes, turns_alone, waited_enough, with_lessons
from records.training.outcome_rewards import OutcomeRewards
from records.training.repeats import has_score, num_repeatable, repeat_no_more, to_trained
from records.training.share import UNCAPPED, LessonShares, Share
from records.training.step_results import SampleResult, figure_columns
from records.turns.recording import RecordingKind
from records.types import START, PolicyVersion


def ready_count(
    connection: Connection, outcomes: OutcomeRewards | None, now: float, repeats: bool = False
) -> int:
    """Number of turns that wait for a trainer, without those that wait for an outcome; with
    `repeats`, including those that may train again.
    """
    statement = select(func.count()).where(TurnRow.state == TurnState.READY)
    may_train = waited_enough(outcomes, now)
    if may_train is not None:
        statement = statement.where(may_train(TurnRow))
    again = num_repeatable(connection) if repeats else 0
    return again + (connection.scalar(statement) or 0)


def enough_ready(
    connection: Connection,
    count: int,
    now: float,
    lessons: bool = False,
    outcomes: OutcomeRewards | None = None,
    repeats: bool = False,
) -> bool:
    """Whether a lease would find `count` turns, with `repeats` including those that may train
    again, or turns and `lessons`: a waiting trainer asks this without taking a write lock.
    """
    expired = and_(TurnRow.state == TurnState.LEASED, TurnRow.claim_until < now)
    statement = select(func.count()).where(or_(TurnRow.state == TurnState.READY, expired))
    may_train = waited_enough(outcomes, now)
    if may_train is not None:
        statement = statement.where(may_train(TurnRow))
    found = connection.scalar(statement) or 0
    if lessons and found < count:
        found += steps.num_ready(connection, now)
    if repeats and found < count:
        found += num_repeatable(connection)
    return found >= count


def lease_op(
    connection: Connection,
    owner: str,
    count: int,
    now: float,
    ttl_s: float,
    whole_sessions: bool = False,
    share: Share = UNCAPPED,
    after: str = "",
    lessons: LessonShares | None = None,
    outcomes: OutcomeRewards | None = None,
    repeats: bool = False,
) -> Taken:
    """Lease `count` ready turns, or turns and `lessons` (records/training/batches.py says which),
    or none.

    With `whole_sessions`, the other ready turns of their sessions too. With `outcomes`, turns wait
    for their sessions' outcomes. With `repeats`, turns that have trained before fill up a batch
    without lessons. Expired leases are ready again.
    """
    _to_ready(connection, now, TurnRow.claim_until < now)
    steps.give_back(connection, now, LessonRow.claim_until < now)
    may_train = waited_enough(outcomes, now)
    if lessons is None:
        batch = turns_alone(connection, count, now, share, after, may_train, repeats)
    else:
        batch = with_lessons(connection, count, now, share, lessons, after, may_train)
    if batch is None:
        return Taken(last_scope=after)
    turn_ids = batch.turn_ids
    if whole_sessions:
        turn_ids = _with_sessions(connection, turn_ids, may_train)
    for part in chunks(turn_ids):
        connection.execute(
            update(TurnRow)
            .where(TurnRow.turn_id.in_(part))
            .values(
                state=TurnState.LEASED,
                claim_owner=owner,
                claim_until=now + ttl_s,
                updated_at=now,
            )
        )
    steps.lease(connection, batch.lesson_ids, owner, now, ttl_s)
    return Taken(turn_ids=turn_ids, lesson_ids=batch.lesson_ids, last_scope=batch.last_scope)


def _with_sessions(
    connection: Connection, turn_ids: list[str], may_train: Condition | None
) -> list[str]:
    """These turns and the other ready ones of their sessions that `may_train`."""
    sessions = select(TurnRow.session_id).where(TurnRow.turn_id.in_(turn_ids))
    statement = select(TurnRow.turn_id).where(
        TurnRow.state == TurnState.READY, TurnRow.session_id.in_(sessions)
    )
    if may_train is not None:
        statement = statement.where(may_train(TurnRow))
    more = connection.scalars(
        statement.order_by(TurnRow.created_at, TurnRow.turn_id).with_for_update(skip_locked=True)
    )
    return list(dict.fromkeys([*turn_ids, *more]))


def extend_leases_op(connection: Connection, owner: str, until: float) -> int:
    """Hold all leases of `owner` until `until`, including those past their deadlines; returns how
    many.

    A lease past its deadline is its owner's until somebody else leases the turn or lesson.
    """
    turns = connection.execute(
        update(TurnRow)
        .where(TurnRow.state == TurnState.LEASED, TurnRow.claim_owner == owner)
        .values(claim_until=until)
    ).rowcount
    return turns + steps.extend(connection, owner, until)


def release_op(connection: Connection, owner: str, now: float) -> int:
    """All leases of `owner` -> ready; returns how many."""
    lessons = steps.give_back(connection, now, LessonRow.claim_owner == owner)
    return lessons + _to_ready(connection, now, TurnRow.claim_owner == owner)


def release_all_op(connection: Connection, now: float) -> int:
    """All leases -> ready; returns how many."""
    return steps.give_back(connection, now) + _to_ready(connection, now)


def _to_ready(connection: Connection, now: float, *conditions: Any) -> int:
    """leased -> ready; dropped if the hint ended meanwhile; trained if the turn was trained before.
    Returns how many.
    """
    again = to_trained(connection, now, *conditions)
    ended = ending.drop_turns(connection, now, TurnRow.state == TurnState.LEASED, *conditions)
    return (
        again
        + ended
        + connection.execute(
            update(TurnRow)
            .where(TurnRow.state == TurnState.LEASED, *conditions)
            .values(state=TurnState.READY, claim_owner=None, claim_until=None, updated_at=now)
        ).rowcount
    )


def expire_op(connection: Connection, oldest_allowed: int, now: float) -> int:
    """Ready turns with tokens of a version before `oldest_allowed` -> dropped(stale); trained ones
    no longer train.

    Responses of recordings stay: their version is the one that scored them, and no policy of the
    run sampled them.
    """
    is_recorded = exists().where(
        RecordingRow.turn_id == TurnRow.turn_id, RecordingRow.kind != RecordingKind.RESAMPLED
    )
    is_old = and_(TurnRow.oldest_version < oldest_allowed, ~is_recorded)
    repeat_no_more(connection, is_old)
    return connection.execute(
        update(TurnRow)
        .where(TurnRow.state == TurnState.READY, is_old)
        .values(state=TurnState.DROPPED, drop_reason=DropReason.STALE, updated_at=now)
    ).rowcount


def any_without_outcome(connection: Connection, outcomes: OutcomeRewards, now: float) -> bool:
    """Whether `without_outcome_op` would drop a turn: asked before the write lock is taken."""
    found = select(TurnRow.turn_id).where(_is_without_outcome(outcomes, now)).limit(1)
    return connection.scalar(found) is not None


def _is_without_outcome(outcomes: OutcomeRewards, now: float) -> ColumnElement[bool]:
    """Whether a ready turn has nothing to train on: no outcome will come, and no hint trains."""
    without = and_(
        TurnRow.state == TurnState.READY,
        none_comes(TurnRow, now - outcomes.wait_s),
        ~has_outcome(TurnRow),
    )
    return and_(without, ~has_score(TurnRow)) if outcomes.hints_train else without


def without_outcome_op(connection: Connection, outcomes: OutcomeRewards, now: float) -> int:
    """Ready turns without an outcome to come or a hint to train on -> dropped(no_outcome)."""
    alone(connection)
    return connection.execute(
        update(TurnRow)
        .where(_is_without_outcome(outcomes, now))
        .values(state=TurnState.DROPPED, drop_reason=DropReason.NO_OUTCOME, updated_at=now)
    ).rowcount


def commit_step_op(
    connection: Connection,
    version: PolicyVersion,
    results: Sequence[SampleResult],
    lessons: Sequence[SampleResult],
    now: float,
    replay_times: int = 1,
) -> None:
    """Insert the version and what it made of its turns and `lessons`; leased -> trained. After that
    a turn may train again until it has trained `replay_times`. The same step again changes nothing.
    Turns that a rollback withdraws no longer train.

    Raises StoreConflict if the version number is taken or a turn or lesson is not leased.
    """
    if not _new_version(connection, version):
        return
    if version.restores is not None:
        repeat_no_more(connection, TurnRow.trained_version > version.restores)
    turn_ids = [result.turn_id for result in results]
    if results:
        _leased_to_trained(connection, version.version, turn_ids, now, times=replay_times)
        connection.execute(
            insert(SampleRow), [_sample_row(result, version.version, now) for result in results]
        )
    steps.train(connection, version.version, lessons, now)
    if replay_times > 1:
        # A hint may have ended during the step.
        repeat_no_more(connection, ending.only_ended())
    lesson_ids = [result.turn_id for result in lessons]
    hint_ids = steps.hints_of(connection, lesson_ids)
    hint_versions.trained(connection, version.version, turn_ids, hint_ids)


def commit_handed_over_op(
    connection: Connection,
    version: PolicyVersion,
    turn_ids: Sequence[str],
    lesson_ids: Sequence[str],
    owner: str,
    now: float,
) -> None:
    """Insert the version of a step that another process took; its turns and lessons: leased ->
    trained.

    The same step again changes nothing. Raises StoreConflict if the version number is taken or a
    turn or lesson is not leased by `owner`.
    """
    if not _new_version(connection, version):
        return
    _leased_to_trained(connection, version.version, turn_ids, now, TurnRow.claim_owner == owner)
    steps.mark_trained(connection, version.version, lesson_ids, now, LessonRow.claim_owner == owner)
    hint_ids = steps.hints_of(connection, lesson_ids)
    hint_versions.trained(connection, version.version, turn_ids, hint_ids)


def _new_version(connection: Connection, version: PolicyVersion) -> bool:
    """Insert a version; False if it is already there. Raises StoreConflict for a taken number."""
    taken = connection.scalar(
        select(PolicyVersionRow.manifest_hash).where(PolicyVersionRow.version == version.version)
    )
    if taken is not None:
        if taken == version.manifest_hash:
            return False
        raise StoreConflict(f"policy version {version.version} exists with another manifest")
    connection.execute(insert(PolicyVersionRow), version_row(version))
    return True


def _leased_to_trained(
    connection: Connection,
    version: int,
    turn_ids: Sequence[str],
    now: float,
    *conditions: Any,
    times: int = 1,
) -> None:
    trained_now = TurnRow.times_trained + 1
    trained = sum(
        connection.execute(
            update(TurnRow)
            .where(TurnRow.turn_id.in_(part), TurnRow.state == TurnState.LEASED, *conditions)
            .values(
                state=TurnState.TRAINED,
                trained_version=version,
                times_trained=trained_now,
                times_left=case((trained_now < times, times - trained_now), else_=0),
                claim_owner=None,
                claim_until=None,
                updated_at=now,
            )
        ).rowcount
        for part in chunks(turn_ids)
    )
    if trained != len(turn_ids):
        raise StoreConflict(
            f"step {version} trained {len(turn_ids)} turns, but only {trained} of them are leased"
        )


def _sample_row(result: SampleResult, version: int, now: float) -> dict[str, Any]:
    return {
        "turn_id": result.turn_id,
        "version": version,
        "staleness": result.staleness,
        "advantage_mean": result.advantage_mean,
        "advantage_abs_max": result.advantage_abs_max,
        "advantages": result.advantages,
        "created_at": now,
        **figure_columns(result),
    }


def version_row(version: PolicyVersion) -> dict[str, Any]:
    """A policy version as a row."""
    return {
        "version": version.version,
        "parent_version": version.parent_version,
        "checkpoint": version.checkpoint,
        "manifest_hash": version.manifest_hash,
        "created_at": version.created_at,
        "abandoned": version.abandoned,
        "restores": version.restores,
    }


def next_version(connection: Connection) -> int:
    """One more than every version that ever existed, abandoned ones included; 0 is the start."""
    return (connection.scalar(select(func.max(PolicyVersionRow.version))) or 0) + 1


def highest_version(connection: Connection) -> int:
    """The highest number of any version, and of any that sampled a token; 0 if there is none.

    If weights are published before they are in a checkpoint, turns and lessons have versions for
    which no step was committed.
    """
    trained = connection.scalar(select(func.max(PolicyVersionRow.version)))
    sampled = connection.scalar(select(func.max(TurnRow.newest_version)))
    lessons = connection.scalar(select(func.max(LessonRow.newest_version)))
    return max(trained or 0, sampled or 0, lessons or 0)


def versions_given_up(connection: Connection) -> set[int]:
    """Versions that the policy has left: abandoned ones, and those that a rollback withdrew."""
    table = aliased(PolicyVersionRow)
    withdrawn = exists().where(
        table.restores < PolicyVersionRow.version,
        table.version > PolicyVersionRow.version,
        table.abandoned.is_(False),
    )
    statement = select(PolicyVersionRow.version).where(
        or_(PolicyVersionRow.abandoned.is_(True), withdrawn)
    )
    return set(connection.scalars(statement))


def newest_versions(connection: Connection, limit: int) -> list[PolicyVersion]:
    """The newest versions, newest first, including those that were given up."""
    rows = connection.execute(
        select(PolicyVersionRow.__table__).order_by(PolicyVersionRow.version.desc()).limit(limit)
    )
    return [PolicyVersion(**row._mapping) for row in rows]


def is_start(connection: Connection, version: int) -> bool:
    """Whether a version has the weights of the start."""
    made = select(PolicyVersionRow.checkpoint).where(PolicyVersionRow.version == version)
    return version == 0 or connection.scalar(made) == START


def latest_version(connection: Connection) -> PolicyVersion | None:
    """The newest version that is not abandoned."""
    row = connection.execute(
        select(PolicyVersionRow.__table__)
        .where(PolicyVersionRow.abandoned.is_(False))
        .order_by(PolicyVersionRow.version.desc())
        .limit(1)
    ).one_or_none()
    return None if row is None else PolicyVersion(**row._mapping)
