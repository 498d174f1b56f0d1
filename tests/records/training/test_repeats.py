"""Turns that train more than once: how often, until when, and never once their hint has ended."""

from __future__ import annotations

from typing import Any

import pytest

from records.care.deletion import delete_sessions_op
from records.care.verify import verify_database
from records.errors import StoreConflict
from records.hints.types import HintStatus
from records.names import DropReason, TurnState
from records.store import Store
from records.types import VersionSpan
from tests.records.builders import TRAINER, a_result, a_version, state_of, turn_in
from tests.records.conftest import Clock
from tests.records.hints.test_ending import rule, scored

READY, LEASED, TRAINED = TurnState.READY, TurnState.LEASED, TurnState.TRAINED
TIMES = 3


async def leased(store: Store, count: int = 1) -> dict[str, int]:
    """Turn id -> how often it had trained before."""
    found = await store.lease(owner=TRAINER, count=count, ttl_s=60.0, repeats=True)
    return {sample.turn_id: sample.times_trained for sample in found}


async def step(store: Store, number: int, *turn_ids: str, **changes: Any) -> None:
    await store.commit_step(
        version=a_version(number, **changes),
        results=[a_result(turn_id) for turn_id in turn_ids],
        replay_times=TIMES,
    )


async def trained(store: Store) -> str:
    """A turn that trained once, in version 1, and may train twice more."""
    turn_id = await turn_in(store, LEASED)
    await step(store, 1, turn_id)
    return turn_id


async def is_sound(store: Store) -> bool:
    return await verify_database(store.config) == []


async def test_a_turn_trains_as_often_as_it_may_and_stays_trained(store: Store) -> None:
    turn_id = await trained(store)
    assert await store.ready_count() == 0
    assert await store.ready_count(repeats=True) == 1
    assert await store.lease(owner=TRAINER, count=1, ttl_s=60.0) == [], "only who asks gets it"
    for number in (2, 3):
        assert await leased(store) == {turn_id: number - 1}
        assert await leased(store) == {}, "once at a time"
        assert await is_sound(store)
        await step(store, number, turn_id)
        assert await state_of(store, turn_id) is TRAINED
    assert await leased(store) == {}
    assert await store.ready_count(repeats=True) == 0
    assert await is_sound(store)


async def test_new_turns_go_first_and_then_what_trained_least(store: Store) -> None:
    twice = await trained(store)
    assert await leased(store) == {twice: 1}
    await step(store, 2, twice)
    once = await turn_in(store, LEASED)
    await step(store, 3, once)
    new = [await turn_in(store, READY) for _ in range(2)]
    assert await leased(store, 3) == {new[0]: 0, new[1]: 0, once: 1}
    assert await leased(store, 2) == {}
    assert await leased(store) == {twice: 2}


async def test_a_lease_that_ends_leaves_it_trained(store: Store, clock: Clock) -> None:
    turn_id = await trained(store)
    assert await leased(store) == {turn_id: 1}
    assert await store.release_leases(TRAINER) == 1
    assert await state_of(store, turn_id) is TRAINED
    assert await leased(store) == {turn_id: 1}
    clock.now += 61
    assert await leased(store) == {turn_id: 1}, "past its deadline"


async def test_what_cannot_train_again_stays_trained(store: Store) -> None:
    turn_id = await trained(store)
    assert await leased(store) == {turn_id: 1}
    assert not await store.drop("somebody", turn_id, DropReason.BELOW_NOISE)
    assert await store.drop(TRAINER, turn_id, DropReason.BELOW_NOISE)
    assert await state_of(store, turn_id) is TRAINED
    assert await leased(store) == {}
    assert await store.drops() == {}


async def test_what_is_too_old_trains_no_more(store: Store) -> None:
    spans = (VersionSpan(version=4, start=0, end=3),)
    turn_id = await turn_in(store, LEASED, version_spans=spans)
    await step(store, 5, turn_id)
    assert await store.expire_stale(oldest_allowed=4) == 0
    assert await leased(store) == {turn_id: 1}
    await store.release_leases(TRAINER)
    assert await store.expire_stale(oldest_allowed=5) == 0, "nothing is lost: it has trained"
    assert await state_of(store, turn_id) is TRAINED
    assert await leased(store) == {}


async def test_what_a_rollback_withdraws_trains_no_more(store: Store) -> None:
    kept = await trained(store)
    gone = await turn_in(store, LEASED)
    await step(store, 2, gone)
    await step(store, 3, restores=1)
    assert await leased(store) == {kept: 1}


async def test_what_an_ended_hint_taught_trains_no_more(store: Store) -> None:
    hint_id, turn_id = await rule(store)
    await scored(store, turn_id)
    assert await leased(store) == {turn_id: 0}
    await step(store, 1, turn_id)
    assert await leased(store) == {turn_id: 1}
    assert await store.set_hint_status(hint_id, HintStatus.WITHDRAWN, "users objected")
    await store.release_leases(TRAINER)
    assert await leased(store) == {}, "given back after its hint ended"


async def test_a_hint_that_ends_during_a_step_teaches_no_more(store: Store) -> None:
    hint_id, turn_id = await rule(store)
    await scored(store, turn_id)
    assert await leased(store) == {turn_id: 0}
    assert await store.set_hint_status(hint_id, HintStatus.WITHDRAWN, "users objected")
    await step(store, 1, turn_id)
    assert await leased(store) == {}
    # Nor after a start that puts the store right.
    chain = [(a_version(1), [turn_id]), (a_version(2), [turn_id])]
    await store.reconcile(chain, repeated={turn_id}, replay_times=TIMES)
    assert await leased(store) == {}


async def test_a_start_brings_back_nothing_that_a_rollback_withdrew(store: Store) -> None:
    kept, gone = await trained(store), await turn_in(store, LEASED)
    chain = [(a_version(1), [kept]), (a_version(2), [gone]), (a_version(3, restores=1), [])]
    # The store heard of neither the second step nor the rollback.
    await store.reconcile(chain, replay_times=TIMES)
    assert await leased(store) == {kept: 1}


async def test_a_start_counts_every_step_of_a_hint(store: Store) -> None:
    hint_id, turn_id = await rule(store)
    await scored(store, turn_id)
    for number in (1, 2):
        assert await leased(store) == {turn_id: number - 1}
        await step(store, number, turn_id)
    chain = [(a_version(1), [turn_id]), (a_version(2), [turn_id])]
    await store.reconcile(chain, repeated={turn_id}, replay_times=TIMES)
    [hint] = await store.hints()
    assert (hint.hint_id, hint.trained_since, hint.num_steps) == (hint_id, 1, 2)


@pytest.mark.parametrize("leases", [False, True])
async def test_what_lost_its_hint_trains_no_more(store: Store, leases: bool) -> None:
    hint_id, turn_id = await rule(store)
    await scored(store, turn_id)
    assert await leased(store) == {turn_id: 0}
    await step(store, 1, turn_id)
    if leases:
        assert await leased(store) == {turn_id: 1}
    assert await store.delete_hint(hint_id) is not None
    await store.release_leases(TRAINER)
    assert await leased(store) == {}
    assert await state_of(store, turn_id) is TRAINED


async def test_what_was_forgotten_trains_no_more(store: Store) -> None:
    turn_id = await trained(store)
    turn = await store.turn(turn_id)
    assert turn is not None
    await store.write(delete_sessions_op, session_ids=[turn.session_id], reason="forget", now=1.0)
    assert await leased(store) == {}


async def test_the_chain_says_how_often(store: Store) -> None:
    turn_id = await trained(store)
    assert await leased(store) == {turn_id: 1}
    chain = [(a_version(1), [turn_id]), (a_version(2), [turn_id])]
    with pytest.raises(StoreConflict, match="trained twice"):
        await store.reconcile(chain)
    # A checkpoint that the store never heard of.
    report = await store.reconcile(chain, repeated={turn_id}, replay_times=TIMES)
    assert report.turns_marked_trained == 1
    assert await leased(store) == {turn_id: 2}
    # One that was lost: the turn may train for that time once more.
    report = await store.reconcile(chain[:1], replay_times=TIMES)
    assert (report.turns_returned, report.turns_marked_trained) == (0, 1)
    assert await leased(store) == {turn_id: 1}
    # All of them.
    assert (await store.reconcile([], replay_times=TIMES)).turns_returned == 1
    assert await state_of(store, turn_id) is READY
    assert await leased(store) == {turn_id: 0}
    assert await is_sound(store)
