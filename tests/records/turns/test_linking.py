from __future__ import annotations

from records.messages import fingerprint, path_ids
from records.names import TurnState
from records.store import Store
from tests.records.builders import (
    ANSWER,
    REPLY,
    SCOPE,
    USER,
    a_session,
    a_turn,
    following,
    recorded,
    turn_in,
)
from tests.records.conftest import Clock
from tests.records.looking import list_turns


async def test_long_paths_exceed_one_query(store: Store) -> None:
    messages = [{"role": "user", "content": str(index)} for index in range(1201)]
    turn_id = await recorded(store, messages=messages)
    nodes = path_ids(SCOPE, [*messages, ANSWER])
    [ref] = await store.turns_by_response_node(SCOPE, nodes)
    assert ref.turn_id == turn_id
    assert await store.session_of_nodes(SCOPE, nodes) == ref.session_id
    turn = await store.turn(turn_id)
    assert turn is not None
    assert turn.messages == messages


async def test_siblings_share_prompt_and_response_nodes(store: Store) -> None:
    first, second = await recorded(store), await recorded(store)
    prompt, response = path_ids(SCOPE, [USER, ANSWER])
    siblings = await store.turns_by_prompt_node(SCOPE, prompt)
    assert [ref.turn_id for ref in siblings] == [first, second]
    assert await store.turns_by_response_node(SCOPE, [response]) == siblings
    assert await store.turns_by_prompt_node("other", prompt) == []
    assert siblings[0].prompt_node_id == prompt
    assert siblings[0].response_node_id == response


async def test_a_reference_says_whether_the_turn_is_answered(store: Store) -> None:
    turn_id = await recorded(store)
    prompt = path_ids(SCOPE, [USER])[0]
    [before] = await store.turns_by_prompt_node(SCOPE, prompt)
    await store.set_next_state(turn_id, [REPLY])
    [after] = await store.turns_by_prompt_node(SCOPE, prompt)
    assert (before.has_next_state, before.state) == (False, TurnState.AWAITING_NEXT_STATE)
    assert (after.has_next_state, after.state) == (True, TurnState.JUDGING)


async def test_a_fingerprint_is_found_within_scope_time_and_session(
    store: Store, clock: Clock
) -> None:
    old = await recorded(store)
    clock.now += 100
    since = clock.now
    session_id = await a_session(store)
    new = await recorded(
        store,
        session_id=session_id,
        messages=[{"role": "system", "content": "12:01"}, USER],
        response={**ANSWER, "content": "  It is 70 F. ", "reasoning_content": "x"},
    )
    print_of = fingerprint(ANSWER)

    async def found(since: float, limit: int = 8, session_id: str | None = None) -> list[str]:
        refs = await store.turns_by_fingerprint(SCOPE, print_of, since, limit, session_id)
        return [ref.turn_id for ref in refs]

    assert await found(0.0) == [old, new]
    assert await found(since) == [new]
    assert await found(0.0, 1) == [new]
    assert await store.turns_by_fingerprint("other", print_of, 0.0, 8) == []
    assert await store.turns_by_id(SCOPE, [old], print_of) != []
    assert await store.turns_by_id(SCOPE, [old], fingerprint(REPLY)) == []


async def test_of_many_equal_answers_those_of_the_session_then_unanswered_ones_are_compared(
    store: Store,
) -> None:
    mine = await a_session(store)
    own = await recorded(store, session_id=mine)
    await store.set_next_state(own, [REPLY])
    waiting = await recorded(store)
    too_late = await recorded(store)
    await store.close_session((await store.turns([too_late]))[0].session_id, "client")
    newest = await recorded(store)
    await store.set_next_state(newest, [REPLY])
    key = fingerprint(ANSWER)

    async def found(limit: int, session_id: str | None) -> list[str]:
        refs = await store.turns_by_fingerprint(SCOPE, key, 0.0, limit, session_id)
        return [ref.turn_id for ref in refs]

    assert await found(1, mine) == [own]
    assert await found(1, None) == [too_late]
    assert await found(2, mine) == [own, too_late]
    assert await found(3, mine) == [own, waiting, too_late]
    assert await found(4, None) == [own, waiting, too_late, newest]


async def test_the_deepest_node_decides_the_session_then_the_newest_turn(store: Store) -> None:
    shallow = a_turn(await a_session(store))
    deep = following(shallow, session_id=await a_session(store))
    for turn in (shallow, deep):
        await store.record_turn(turn, scope=SCOPE)
    nodes = path_ids(SCOPE, [USER, ANSWER, REPLY])
    assert await store.session_of_nodes(SCOPE, nodes) == deep.session_id
    assert await store.session_of_nodes(SCOPE, nodes[:2]) == shallow.session_id
    newer = a_turn(await a_session(store))
    await store.record_turn(newer, scope=SCOPE)
    assert await store.session_of_nodes(SCOPE, nodes[:2]) == newer.session_id
    assert await store.session_of_nodes("other", nodes) is None
    assert await store.session_of_nodes(SCOPE, []) is None


async def test_turns_are_listed_newest_first(store: Store) -> None:
    session_id = await a_session(store)
    turn_ids = [await recorded(store, session_id=session_id) for _ in range(3)]
    ready = await turn_in(store, TurnState.READY)
    listed = await list_turns(store, session_id, limit=2)
    assert [ref.turn_id for ref in listed] == [turn_ids[2], turn_ids[1]]
    assert [ref.turn_id for ref in await list_turns(store, state=TurnState.READY)] == [ready]
    assert len(await list_turns(store)) == 4
