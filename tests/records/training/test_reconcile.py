from __future__ import annotations

import time
from dataclasses import replace

import pytest
from sqlalchemy import select, update

from records.care.housekeeping import Housekeeping
from records.errors import StoreConflict
from records.names import DropReason, TurnState
from records.store import Store
from records.tables.models import TurnRow
from records.types import PolicyVersion, VersionSpan
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
    assert [(example.turn.turn_id, example.sample.version) for example in examples] == [
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


async def set_state(store: Store, turn_id: str, state: TurnState) -> None:
    """Change a turn as no code of the project does."""
    change = update(TurnRow).where(TurnRow.turn_id == turn_id).values(state=state)
    await store.writer.run(lambda connection: connection.execute(change))


async def agreed(store: Store, num: int = 2) -> list[tuple[PolicyVersion, list[str]]]:
    """The chain of so many steps, with which the store was compared."""
    steps = [await trained(store) for _ in range(num)]
    chain = [(a_version(version), [turn_id]) for turn_id, version in steps]
    await store.reconcile(chain)
    return chain


async def test_what_was_compared_once_is_not_compared_again(store: Store) -> None:
    chain = await agreed(store)
    [first] = chain[0][1]
    turn_id, version = await trained(store)
    chain.append((a_version(version), [turn_id]))
    await set_state(store, first, READY)
    assert (await store.reconcile(chain)).turns_marked_trained == 0
    assert await state_of(store, first) is READY, "only what is newer was looked at"
    await Housekeeping(store, time.time).compare_all_at_start()
    assert (await store.reconcile(chain)).turns_marked_trained == 1
    assert await state_of(store, first) is TRAINED


@pytest.mark.parametrize("changed", ["parent", "turns", "lessons", "shorter", "longer"])
async def test_a_chain_that_begins_differently_is_compared_as_a_whole(
    store: Store, changed: str
) -> None:
    chain = await agreed(store, 3)
    [first], [last] = chain[0][1], chain[2][1]
    await set_state(store, first, READY)
    lessons: list[tuple[PolicyVersion, list[str]]] = []
    if changed == "parent":
        version, turn_ids = chain[2]
        chain[2] = (replace(version, parent_version=0), turn_ids)
    elif changed == "turns":
        chain[2] = (chain[2][0], [])
    elif changed == "longer":
        chain.insert(0, (a_version(0, parent_version=None), []))
    elif changed == "lessons":
        lessons = [(version, []) for version, _ in chain]
    else:
        chain.pop()
    report = await store.reconcile(chain, lessons)
    assert report.turns_marked_trained == 1
    assert await state_of(store, first) is TRAINED
    assert await state_of(store, last) is (READY if changed in ("turns", "shorter") else TRAINED)


async def test_a_crash_before_the_commit_is_found_after_an_agreement(store: Store) -> None:
    chain = await agreed(store)
    turn_id = await turn_in(store, LEASED)
    chain.append((a_version(3), [turn_id]))
    report = await store.reconcile(chain)
    assert report.versions_added == (3,)
    assert (report.leases_released, report.turns_marked_trained) == (1, 1)
    assert await state_of(store, turn_id) is TRAINED
    again = await store.reconcile(chain)
    assert (again.versions_added, again.turns_marked_trained) == ((), 0)


async def test_a_checkpoint_lost_after_an_agreement_gives_its_turns_back(store: Store) -> None:
    chain = await agreed(store)
    lost, version = await trained(store)
    report = await store.reconcile(chain)
    assert report.versions_abandoned == (version,)
    assert report.turns_returned == 1
    assert await state_of(store, lost) is READY
    # And without any turn.
    empty = a_version(version + 1, parent=2)
    await store.commit_step(version=empty, results=[])
    assert (await store.reconcile(chain)).versions_abandoned == (version + 1,)


async def test_a_turn_trained_again_after_an_agreement_is_refused(store: Store) -> None:
    chain = await agreed(store)
    chain.append((a_version(3), chain[0][1]))
    with pytest.raises(StoreConflict, match="was trained twice: in versions 1 and 3"):
        await store.reconcile(chain)
    report = await store.reconcile(chain, repeated=chain[0][1], replay_times=3)
    assert (report.versions_added, report.turns_marked_trained) == ((3,), 1)
    row = select(TurnRow.trained_version, TurnRow.times_trained, TurnRow.times_left)
    found = await store.read(
        lambda connection: connection.execute(row.where(TurnRow.turn_id == chain[0][1][0])).one()
    )
    assert tuple(found) == (3, 2, 1)


async def test_an_agreement_survives_a_second_process_and_deleted_turns(store: Store) -> None:
    chain = await agreed(store)
    turn = await store.turn(chain[0][1][0])
    assert turn is not None
    keeper = Housekeeping(store, time.time)
    await keeper.delete([turn.session_id], "forget", patience_s=0.0)
    async with await Store.open(store.config) as other:
        assert (await other.reconcile(chain)).unknown_turns == ()
        await keeper.compare_all_at_start()
        assert (await other.reconcile(chain)).unknown_turns == (turn.turn_id,)
