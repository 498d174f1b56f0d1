from __future__ import annotations

import pytest

from records.errors import StoreConflict
from records.names import DropReason, TurnState
from records.store import Store
from records.types import VersionSpan
from tests.records.builders import TRAINER, a_result, a_version, recorded, state_of, turn_in
from tests.records.looking import sampled_from_abandoned

READY, LEASED, TRAINED = TurnState.READY, TurnState.LEASED, TurnState.TRAINED


async def trained(store: Store) -> tuple[str, int]:
    """A turn trained in a step of its own, and the version of that step."""
    turn_id = await turn_in(store, TRAINED)
    latest = await store.latest_version()
    assert latest is not None
    return turn_id, latest.version


async def test_a_store_that_agrees_is_left_alone(store: Store) -> None:
    (first, one), (second, two) = await trained(store), await trained(store)
    chain = [(a_version(one), [first]), (a_version(two), [second])]
    report = await store.reconcile(chain)
    assert report.versions_added == report.versions_abandoned == report.unknown_turns == ()
    assert report.turns_returned == report.turns_marked_trained == report.leases_released == 0
    assert await store.latest_version() == a_version(two)


async def test_a_checkpoint_that_the_store_never_heard_of_is_added(store: Store) -> None:
    turn_id = await turn_in(store, LEASED)
    report = await store.reconcile([(a_version(1), [turn_id])])
    assert report.versions_added == (1,)
    assert (report.leases_released, report.turns_marked_trained) == (1, 1)
    assert await state_of(store, turn_id) is TRAINED
    assert await store.latest_version() == a_version(1)
    again = await store.reconcile([(a_version(1), [turn_id])])
    assert (again.versions_added, again.turns_marked_trained) == ((), 0)


async def test_turns_of_a_lost_checkpoint_return_and_its_number_is_never_reused(
    store: Store,
) -> None:
    (kept, one), (lost, two) = await trained(store), await trained(store)
    report = await store.reconcile([(a_version(one), [kept])])
    assert report.versions_abandoned == (two,)
    assert report.turns_returned == 1
    assert await state_of(store, kept) is TRAINED
    assert await state_of(store, lost) is READY
    assert await store.latest_version() == a_version(one)
    assert await store.next_version() == two + 1
    [sample] = await store.lease(owner=TRAINER, count=1, ttl_s=1.0)
    assert sample.turn_id == lost
    version = a_version(two + 1, parent=one)
    await store.commit_step(version=version, results=[a_result(lost)])
    chain = [(a_version(one), [kept]), (version, [lost])]
    assert (await store.reconcile(chain)).versions_abandoned == ()
    examples = await store.example_turns(5)
    assert [(example.turn.turn_id, example.version) for example in examples] == [
        (lost, two + 1),
        (kept, one),
    ]


async def test_losing_every_checkpoint_returns_every_turn(store: Store) -> None:
    turns = [await trained(store) for _ in range(3)]
    report = await store.reconcile([])
    assert report.versions_abandoned == tuple(version for _, version in turns)
    assert report.turns_returned == 3
    assert await store.latest_version() is None
    assert await store.next_version() == turns[-1][1] + 1
    assert await store.ready_count() == 3


async def test_a_turn_moves_to_the_version_that_trained_it(store: Store) -> None:
    turn_id, version = await trained(store)
    report = await store.reconcile([(a_version(version + 1), [turn_id])])
    assert report.versions_added == (version + 1,)
    assert report.versions_abandoned == (version,)
    assert (report.turns_returned, report.turns_marked_trained) == (0, 1)
    assert await state_of(store, turn_id) is TRAINED


async def test_a_checkpoint_that_comes_back_is_alive_again(store: Store) -> None:
    turn_id, version = await trained(store)
    await store.reconcile([])
    report = await store.reconcile([(a_version(version), [turn_id])])
    assert report.turns_marked_trained == 1
    assert await store.latest_version() == a_version(version)


async def test_a_dropped_turn_on_the_chain_counts_as_trained(store: Store) -> None:
    turn_id = await recorded(store, drop_reason=DropReason.ABORTED)
    await store.reconcile([(a_version(1), [turn_id])])
    assert await state_of(store, turn_id) is TRAINED
    assert await store.drops() == {}


async def test_turns_of_another_store_are_reported(store: Store) -> None:
    report = await store.reconcile([(a_version(1), ["elsewhere"])])
    assert report.unknown_turns == ("elsewhere",)
    assert report.turns_marked_trained == 0


async def test_version_zero_is_never_abandoned(store: Store) -> None:
    start = a_version(0, parent=0, parent_version=None)
    await store.commit_step(version=start, results=[])
    assert (await store.reconcile([])).versions_abandoned == ()
    assert await store.latest_version() == start
    assert await store.next_version() == 1


async def test_a_chain_that_cannot_be_true_is_refused_and_changes_nothing(store: Store) -> None:
    turn_id, version = await trained(store)
    twice = [(a_version(version), [turn_id]), (a_version(version + 1), [turn_id])]
    with pytest.raises(StoreConflict, match="trained twice"):
        await store.reconcile(twice)
    with pytest.raises(StoreConflict, match="has manifest"):
        await store.reconcile([(a_version(version, manifest_hash="forged"), [turn_id])])
    assert await store.next_version() == version + 1
    assert await state_of(store, turn_id) is TRAINED


async def test_turns_sampled_from_an_abandoned_version_are_marked(store: Store) -> None:
    _, version = await trained(store)
    span = VersionSpan(version=version, start=0, end=3)
    turn_id = await recorded(store, version_spans=(span,))
    assert await sampled_from_abandoned(store) == []
    await store.reconcile([])
    assert await sampled_from_abandoned(store) == [turn_id]
