"""What turns of a session were worth: stored with its outcome, read with a batch, and deleted."""

from __future__ import annotations

import pytest

from records.care.deletion import delete_sessions_op
from records.names import TurnState, TurnType
from records.outcomes.values import MOST_TURNS, TurnValue
from records.store import Store
from records.training.history.window import HistoryWindow
from records.training.outcome_rewards import OutcomeRewards
from tests.records.builders import TRAINER, a_session, recorded, turn_in
from tests.records.conftest import Clock

WINDOW = HistoryWindow(versions=0, values=True)
ONLY = OutcomeRewards(kind="only", wait_s=600.0)


async def in_a_row(store: Store, clock: Clock, number: int) -> list[str]:
    """Turns of one session, each the next one's parent; the last is ready to train."""
    session_id, found = await a_session(store), []
    for place in range(number):
        clock.now += 1
        changes = {"session_id": session_id, "parent_turn_id": found[-1] if found else None}
        is_last = place == number - 1
        made = turn_in(store, TurnState.READY, **changes) if is_last else recorded(store, **changes)
        found.append(await made)
    return found


async def verified(store: Store, clock: Clock, *values: TurnValue) -> None:
    clock.now += 1000
    [claimed] = await store.claim_sessions("verifier", limit=1, idle_s=1.0, ttl_s=9.0)
    assert await store.commit_outcome("verifier", claimed, 1.0, None, values)


async def test_values_come_with_the_outcome_and_with_each_turn_of_the_batch(
    store: Store, clock: Clock
) -> None:
    turn_ids = await in_a_row(store, clock, 3)
    assert await store.conversation(turn_ids[-1]) == turn_ids
    assert await store.conversation(turn_ids[1]) == turn_ids[:2]
    values = [TurnValue(turn_id=turn_ids[0], value=0.25, tries=4)]
    values += [TurnValue(turn_id=one, value=None, tries=0) for one in turn_ids[1:]]
    await verified(store, clock, *values)
    [sample] = await store.lease(owner=TRAINER, count=1, ttl_s=9.0, history=WINDOW, outcomes=ONLY)
    assert sample.session.outcome == 1.0
    assert sample.session.values == tuple(zip(turn_ids, (0.25, None, None), strict=True))
    await store.release_leases(TRAINER)
    unasked = HistoryWindow(versions=0, sessions=True)
    [sample] = await store.lease(owner=TRAINER, count=1, ttl_s=9.0, history=unasked, outcomes=ONLY)
    assert sample.session.values == ()
    turn = await store.turn(turn_ids[0])
    assert turn is not None
    [session] = await store.sessions_named(turn.session_id)
    assert [one.worth for one in session.turns] == [0.25, None, None]
    await store.release_leases(TRAINER)
    await store.write(
        delete_sessions_op, session_ids=[turn.session_id], reason="forget", now=clock.now
    )
    assert await store.conversation(turn_ids[-1]) == []


async def test_values_of_earlier_sessions_at_the_task_come_along(
    store: Store, clock: Clock
) -> None:
    before = await in_a_row(store, clock, 2)
    await verified(store, clock, TurnValue(turn_id=before[1], value=0.5, tries=2))
    await store.lease(owner=TRAINER, count=1, ttl_s=9e9, history=WINDOW, outcomes=ONLY)
    await in_a_row(store, clock, 1)
    await verified(store, clock)
    window = HistoryWindow(versions=9, sessions=True, values=True)
    [sample] = await store.lease(owner="b", count=1, ttl_s=9.0, history=window, outcomes=ONLY)
    [past] = sample.session.past
    assert (past.outcome, past.values) == (1.0, ((before[1], 0.5),))
    unvalued = HistoryWindow(versions=9, sessions=True)
    await store.release_leases("b")
    [sample] = await store.lease(owner="b", count=1, ttl_s=9.0, history=unvalued, outcomes=ONLY)
    assert [one.values for one in sample.session.past] == [()]


async def test_a_claim_that_was_lost_stores_nothing(store: Store, clock: Clock) -> None:
    turn_ids = await in_a_row(store, clock, 1)
    clock.now += 1000
    [claimed] = await store.claim_sessions("verifier", limit=1, idle_s=1.0, ttl_s=9.0)
    value = TurnValue(turn_id=turn_ids[0], value=0.5, tries=2)
    assert not await store.commit_outcome("another", claimed, 1.0, None, [value])
    await verified(store, clock)
    [sample] = await store.lease(owner=TRAINER, count=1, ttl_s=9.0, history=WINDOW, outcomes=ONLY)
    assert sample.session.values == ()


async def test_a_long_conversation_is_valued_at_its_end(store: Store, clock: Clock) -> None:
    turn_ids = await in_a_row(store, clock, MOST_TURNS + 2)
    assert await store.conversation(turn_ids[-1]) == turn_ids[2:]


async def test_turns_beside_the_conversation_are_not_part_of_it(store: Store) -> None:
    session_id = await a_session(store)
    first = await recorded(store, session_id=session_id)
    side = await recorded(
        store, session_id=session_id, parent_turn_id=first, turn_type=TurnType.SIDE
    )
    assert await store.conversation(side) == [first]


@pytest.mark.parametrize(("value", "tries"), [(1.5, 2), (None, 1), (0.5, 0), (float("nan"), 1)])
def test_a_value_that_cannot_be_is_refused(value: float | None, tries: int) -> None:
    with pytest.raises(ValueError, match="value"):
        TurnValue(turn_id="turn", value=value, tries=tries)
