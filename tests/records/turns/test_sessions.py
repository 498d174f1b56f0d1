from __future__ import annotations

import asyncio

import pytest

from records.names import DropReason, TurnState
from records.store import Store
from tests.records.builders import REPLY, SCOPE, a_session, a_turn, following, recorded, state_of
from tests.records.conftest import Clock


async def test_a_clients_name_finds_the_same_session_within_its_scope(store: Store) -> None:
    first = await store.ensure_session(scope=SCOPE, external_id="chat \x00 7")
    assert await store.ensure_session(scope=SCOPE, external_id="chat \x00 7") == first
    assert await store.ensure_session(scope=SCOPE, external_id="chat 8") != first
    assert await store.ensure_session(scope="other", external_id="chat \x00 7") != first


async def test_without_a_name_each_session_is_new_and_ours_is_found(store: Store) -> None:
    first, second = await a_session(store), await a_session(store)
    assert first != second
    found = await store.ensure_session(scope=SCOPE, external_id=None, session_id=first)
    assert found == first
    made = await store.ensure_session(scope=SCOPE, external_id=None, session_id="mine")
    assert made == "mine"
    with pytest.raises(ValueError, match="scope"):
        await store.ensure_session(scope="other", external_id=None, session_id=first)


async def test_racing_requests_of_a_new_client_share_one_session(
    store: Store, clock: Clock
) -> None:
    async with await Store.open(store.config, clock) as other:
        ids = await asyncio.gather(
            *(
                which.ensure_session(scope=SCOPE, external_id="new")
                for which in (store, other)
                for _ in range(5)
            )
        )
    assert len(set(ids)) == 1


async def test_only_idle_sessions_are_closed(store: Store, clock: Clock) -> None:
    idle_turn = await recorded(store)
    clock.now += 50
    fresh_turn = await recorded(store)
    clock.now += 20
    assert await store.close_idle_sessions(60.0) == 1
    assert await state_of(store, idle_turn) is TurnState.DROPPED
    assert await state_of(store, fresh_turn) is TurnState.AWAITING_NEXT_STATE
    assert await store.close_idle_sessions(60.0) == 0
    assert await store.drops() == {DropReason.NO_NEXT_STATE: 1}


async def test_activity_keeps_a_session_open(store: Store, clock: Clock) -> None:
    session_id = await a_session(store)
    turn_id = await recorded(store, session_id=session_id)
    for _ in range(3):
        clock.now += 40
        await store.ensure_session(scope=SCOPE, external_id=None, session_id=session_id)
        assert await store.close_idle_sessions(60.0) == 0
    assert await state_of(store, turn_id) is TurnState.AWAITING_NEXT_STATE


async def test_more_idle_sessions_than_one_transaction_closes(store: Store, clock: Clock) -> None:
    await asyncio.gather(*(recorded(store) for _ in range(230)))
    clock.now += 100
    assert await store.close_idle_sessions(60.0) == 230


async def test_a_continuation_reopens_the_session_and_the_last_turn(
    store: Store, clock: Clock
) -> None:
    first = a_turn(await a_session(store))
    await store.record_turn(first, scope=SCOPE)
    assert await store.close_session(first.session_id, "session_done") == 1
    assert await store.close_session(first.session_id, "session_done") == 0
    second = following(first)
    assert await store.set_next_state(first.turn_id, [REPLY])
    await store.record_turn(second, scope=SCOPE)
    assert await state_of(store, first.turn_id) is TurnState.JUDGING
    clock.now += 100
    assert await store.close_idle_sessions(60.0) == 1
    assert await state_of(store, second.turn_id) is TurnState.DROPPED
