"""What can no longer train is let go unjudged, and judged later for its hint alone."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Connection, update

from records.feedback.feedback import Feedback
from records.names import DropReason, FeedbackOutcome, TurnState
from records.queue import waiting
from records.queue.freshness import Freshness, Horizon
from records.store import Store
from records.tables.models import TurnRow
from records.types import VersionSpan
from tests.records.builders import (
    HINT,
    OWNER,
    REPLY,
    SCOPE,
    a_verdict,
    a_version,
    recorded,
    turn_in,
)
from tests.records.conftest import Clock
from tests.records.looking import verdict_of
from tests.records.queue.test_round_robin import copies, plans

JUDGING, SCORING, READY, DROPPED = (
    TurnState.JUDGING,
    TurnState.SCORING,
    TurnState.READY,
    TurnState.DROPPED,
)


def sampled_by(version: int) -> tuple[VersionSpan, ...]:
    return (VersionSpan(version=version, start=0, end=3),)


async def versions(store: Store, clock: Clock, count: int, **changes: Any) -> None:
    """Versions 0 to `count` - 1, made now, one second after the other."""
    for number in range(count):
        clock.now += 1
        version = a_version(number, created_at=clock.now, **changes)
        await store.commit_step(version=version, results=[])


async def judging(store: Store, version: int, **changes: Any) -> str:
    turn_id = await recorded(store, version_spans=sampled_by(version), **changes)
    assert await store.set_next_state(turn_id, [REPLY])
    return turn_id


async def became(store: Store, turn_id: str) -> tuple[TurnState, DropReason | None]:
    turn = await store.turn(turn_id)
    assert turn is not None
    return turn.state, turn.drop_reason


async def aged(store: Store, clock: Clock, *, of: int = 6) -> tuple[str, str]:
    """A turn of version 0 and one of the newest of `of` versions: both wait for the judge."""
    await versions(store, clock, 1)
    old = await judging(store, 0)
    for number in range(1, of):
        clock.now += 1
        version = a_version(number, created_at=clock.now)
        await store.commit_step(version=version, results=[])
    return old, await judging(store, of - 1)


FRESH = Freshness(max_staleness=2, batch_size=4)


@pytest.mark.parametrize(("max_staleness", "oldest"), [(0, 5), (2, 3), (5, 0), (6, None)])
async def test_the_horizon_is_as_many_versions_back_as_may_be(
    store: Store, clock: Clock, max_staleness: int, oldest: int | None
) -> None:
    await versions(store, clock, 6)
    found = await store.horizon(Freshness(max_staleness=max_staleness, batch_size=4), None)
    assert (None if found is None else found.oldest_version) == oldest


async def test_abandoned_versions_are_no_steps(store: Store, clock: Clock) -> None:
    await versions(store, clock, 2)
    await store.commit_step(version=a_version(2, created_at=clock.now, abandoned=True), results=[])
    found = await store.horizon(Freshness(max_staleness=0, batch_size=4), None)
    assert found is not None
    assert found.oldest_version == 1


async def test_steps_that_come_before_it_count_and_the_newest_version_always_can(
    store: Store, clock: Clock
) -> None:
    await versions(store, clock, 6)
    clock.now += 1e6  # nobody trains: no pace

    async def oldest(latency_s: float) -> int | None:
        found = await store.horizon(FRESH, latency_s)
        return None if found is None else found.oldest_version

    assert await oldest(1.0) == 3
    for _ in range(4):
        await turn_in(store, READY, version_spans=sampled_by(5))
    assert await oldest(1.0) == 4, "a batch is ready before it"
    for _ in range(8):
        await turn_in(store, READY, version_spans=sampled_by(5))
    assert await oldest(1.0) == 5


async def test_the_pace_of_steps_counts_while_they_are_taken(store: Store, clock: Clock) -> None:
    await versions(store, clock, 6)  # one a second
    found = await store.horizon(FRESH, 1.0)
    assert found is not None
    assert found.oldest_version == 4
    clock.now += 100
    found = await store.horizon(FRESH, 1.0)
    assert found is not None
    assert found.oldest_version == 3


async def test_old_turns_are_let_go_and_judged_last_for_their_hint(
    store: Store, clock: Clock
) -> None:
    old, new = await aged(store, clock)
    horizon = await store.horizon(FRESH, None)
    assert horizon is not None
    turns = await store.claim(
        JUDGING, owner=OWNER, limit=9, ttl_s=60.0, oldest_version=horizon.oldest_version
    )
    assert [turn.turn_id for turn in turns] == [new]
    assert await store.let_go(JUDGING, horizon) == 1
    assert await store.let_go(JUDGING, horizon) == 0
    assert await became(store, old) == (DROPPED, DropReason.OVER_CAPACITY)
    assert await store.judged_share() == 0.0
    (late,) = await store.claim_late(owner=OWNER, limit=9, ttl_s=60.0)
    assert (late.turn_id, late.state, late.for_hint_alone) == (old, JUDGING, True)
    assert await store.claim_late(owner="other", limit=9, ttl_s=60.0) == []
    clock.now += 61  # whoever had it died
    (late,) = await store.claim_late(owner="other", limit=9, ttl_s=60.0)
    assert await store.commit_verdict("other", a_verdict(old), None)
    assert await became(store, old) == (DROPPED, DropReason.HINT_ONLY)
    verdict = await verdict_of(store, old)
    assert verdict is not None
    assert verdict.hint == HINT
    assert await store.claim_late(owner=OWNER, limit=9, ttl_s=60.0) == []
    assert await store.judged_share() is None


@pytest.mark.parametrize("reason", [DropReason.NO_HINT, DropReason.INTERNAL_ERROR])
async def test_what_is_dropped_after_all_is_not_judged_again(
    store: Store, clock: Clock, reason: DropReason
) -> None:
    old, _ = await aged(store, clock)
    horizon = await store.horizon(FRESH, None)
    assert horizon is not None
    await store.let_go(JUDGING, horizon)
    await store.claim_late(owner=OWNER, limit=9, ttl_s=60.0)
    if reason is DropReason.NO_HINT:
        assert await store.commit_verdict(OWNER, a_verdict(old, hint=None), reason)
    else:
        assert await store.drop(OWNER, old, reason, "odd")
    assert await became(store, old) == (DROPPED, reason)
    assert await store.claim_late(owner=OWNER, limit=9, ttl_s=60.0) == []


async def test_what_waits_for_the_teacher_and_cannot_train_is_stale(
    store: Store, clock: Clock
) -> None:
    await versions(store, clock, 1)
    turn_id = await turn_in(store, SCORING)
    await store.release(OWNER, [turn_id])
    for number in range(1, 6):
        clock.now += 1
        version = a_version(number, created_at=clock.now)
        await store.commit_step(version=version, results=[])
    horizon = await store.horizon(FRESH, None)
    assert horizon is not None
    assert await store.let_go(SCORING, horizon) == 1
    assert await became(store, turn_id) == (DROPPED, DropReason.STALE)
    assert await store.claim_late(owner=OWNER, limit=9, ttl_s=60.0) == []


async def test_claimed_turns_are_not_let_go(store: Store, clock: Clock) -> None:
    old, _ = await aged(store, clock)
    await store.claim(JUDGING, owner=OWNER, limit=9, ttl_s=60.0)
    horizon = await store.horizon(FRESH, None)
    assert horizon is not None
    assert await store.let_go(JUDGING, horizon) == 0
    assert await store.commit_verdict(OWNER, a_verdict(old), None)


async def test_feedback_brings_a_let_go_turn_back_to_the_judge(store: Store, clock: Clock) -> None:
    old, _ = await aged(store, clock)
    horizon = await store.horizon(FRESH, None)
    assert horizon is not None
    await store.let_go(JUDGING, horizon)
    kept = await store.add_feedback(SCOPE, old, Feedback(text="No, in Celsius."))
    assert kept is not None
    assert kept.outcome is FeedbackOutcome.TO_BE_JUDGED
    assert await became(store, old) == (JUDGING, None)
    assert await store.let_go(JUDGING, horizon) == 1, "it is no younger for it"
    (late,) = await store.claim_late(owner=OWNER, limit=9, ttl_s=60.0)
    assert "No, in Celsius." in str(late.next_state[-1])


async def test_looking_for_old_turns_reads_the_index(store: Store) -> None:
    like = await recorded(store)
    await store.write(copies, like, "many", TurnState.TRAINED, 20_000)
    for scope, count in (("a", 3000), ("b", 3)):
        await store.write(copies, "many-000000", scope, JUDGING, count)
    await store.write(
        lambda c: c.execute(update(TurnRow).where(TurnRow.state == JUDGING).values(priority=0))
    )
    if store.config.sqlite_path is None:
        await store.write(lambda connection: connection.exec_driver_sql("ANALYZE turns"))
    horizon = Horizon(oldest_version=0, made_at=20_100.0)

    def work(connection: Connection) -> list[str]:
        options: dict[str, Any] = {"now": 2e6}
        return plans(
            connection,
            lambda: (
                waiting.let_go_op(connection, JUDGING, horizon, **options),
                waiting.any_past(connection, JUDGING, horizon, **options),
                waiting.waiting_since(connection, JUDGING),
                waiting.claim_late_op(connection, OWNER, 8, 2e6, 60.0),
            ),
        )

    found = await store.write(work)
    assert len(found) >= 4
    for plan in found:
        assert "ix_turns_state_priority_scope_created_at" in plan, plan
        assert "SCAN turns" not in plan
        assert "Seq Scan on turns" not in plan
