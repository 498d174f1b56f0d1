from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sqlalchemy import update

from records.errors import StoreConflict, StoreCorrupt, UnknownTurn
from records.messages import path_ids
from records.names import DropReason, TurnState, TurnType
from records.store import Store
from records.tables.models import TokensRow
from records.types import CapturedTurn, TurnRecord, VersionSpan
from tests.records.builders import ANSWER, SCOPE, USER, a_session, a_turn, following, recorded

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]


async def stored(store: Store, turn: CapturedTurn) -> TurnRecord:
    await store.record_turn(turn, scope=SCOPE)
    record = await store.turn(turn.turn_id)
    assert record is not None
    return record


async def test_a_turn_comes_back_as_it_was_recorded(store: Store) -> None:
    messages = [
        {"role": "system", "content": "Be \x00 brief \ud800 and kind: é 日本"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image_url"}]},
    ]
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{bad"}}
    turn = a_turn(
        await a_session(store),
        messages=messages,
        tools=TOOLS,
        response={"role": "assistant", "content": None, "tool_calls": [call]},
        sampling={"temperature": 0.7, "top_p": 0.9, "stop": ["x"]},
        distribution_modified="top_p",
        version_spans=(
            VersionSpan(version=3, start=0, end=2),
            VersionSpan(version=4, start=2, end=3),
        ),
        finish_reason="tool_calls",
    )
    record = await stored(store, turn)
    for name in (
        "turn_id",
        "session_id",
        "parent_turn_id",
        "turn_type",
        "messages",
        "tools",
        "response",
        "sampling",
        "distribution_modified",
        "version_spans",
        "finish_reason",
    ):
        assert getattr(record, name) == getattr(turn, name), name
    for name in ("prompt_ids", "response_ids", "rollout_logprobs"):
        np.testing.assert_array_equal(getattr(record, name), getattr(turn, name))
    assert record.state is TurnState.AWAITING_NEXT_STATE
    assert record.drop_reason is None
    assert record.next_state == []
    assert record.hint is None


async def test_a_dropped_turn_keeps_what_it_has(store: Store) -> None:
    turn = a_turn(
        await a_session(store),
        turn_type=TurnType.SIDE,
        response_ids=[],
        version_spans=(),
        sampling={},
        drop_reason=DropReason.SIDE_TURN,
    )
    record = await stored(store, turn)
    assert (record.state, record.drop_reason) == (TurnState.DROPPED, DropReason.SIDE_TURN)
    assert len(record.response_ids) == 0


@pytest.mark.parametrize("config", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": {}}, "temperature"),
        ({"sampling": {"temperature": None}}, "temperature"),
        ({"version_spans": ()}, "version"),
        ({"response_ids": np.array([]), "rollout_logprobs": np.array([])}, "tokens"),
        ({"prompt_ids": np.array([], dtype=np.int32)}, "tokens"),
        ({"rollout_logprobs": np.array([-1, np.nan, -1], dtype=np.float32)}, "not finite"),
        ({"messages": []}, "at least one message"),
        ({"prompt_ids": np.array([0.5])}, "integers"),
        ({"session_id": "nobody"}, "no session"),
        ({"token_parent_id": "nobody", "num_shared_ids": 2}, "not stored"),
    ],
)
async def test_a_turn_that_cannot_be_right_is_refused(
    store: Store, changes: dict[str, Any], message: str
) -> None:
    turn = a_turn(await a_session(store))
    with pytest.raises(ValueError, match=message):
        await store.record_turn(replace(turn, **changes), scope=SCOPE)
    assert await store.turn(turn.turn_id) is None


async def test_a_session_of_another_scope_is_refused(store: Store) -> None:
    turn = a_turn(await a_session(store, scope="other"))
    with pytest.raises(ValueError, match="no session"):
        await store.record_turn(turn, scope=SCOPE)


async def test_recording_again_changes_nothing_but_other_tokens_conflict(store: Store) -> None:
    turn = a_turn(await a_session(store))
    await store.record_turn(turn, scope=SCOPE)
    await store.record_turn(turn, scope=SCOPE)
    with pytest.raises(StoreConflict, match="other tokens"):
        await store.record_turn(
            replace(turn, response_ids=np.array([7, 8, 10], np.int32)), scope=SCOPE
        )
    assert sum((await store.counts()).values()) == 1


async def test_prompts_along_a_chain_are_rebuilt(store: Store) -> None:
    rng = np.random.default_rng(0)
    turn = a_turn(await a_session(store))
    chain = [turn]
    await store.record_turn(turn, scope=SCOPE)
    for index in range(30):
        history = np.concatenate([turn.prompt_ids, turn.response_ids])
        shared = len(history) - int(rng.integers(0, 2))
        new = rng.integers(0, 1000, 5, dtype=np.int32)
        turn = following(
            turn,
            {"role": "user", "content": f"message {index}"},
            prompt_ids=np.concatenate([history[:shared], new]),
            num_shared_ids=shared,
            response_ids=rng.integers(0, 1000, 4),
        )
        chain.append(turn)
        await store.record_turn(turn, scope=SCOPE)
    order = rng.permutation(len(chain))
    records = await store.turns([chain[index].turn_id for index in order])
    for record, index in zip(records, order, strict=True):
        np.testing.assert_array_equal(record.prompt_ids, chain[index].prompt_ids)
        np.testing.assert_array_equal(record.response_ids, chain[index].response_ids)
        assert record.messages == chain[index].messages
    prompt_ids, response_ids = await store.turn_tokens(chain[-1].turn_id)
    np.testing.assert_array_equal(prompt_ids, chain[-1].prompt_ids)
    np.testing.assert_array_equal(response_ids, chain[-1].response_ids)


@pytest.mark.parametrize("shared", [7, 6, 3])
async def test_shared_ids_that_differ_from_the_parent_are_refused(
    store: Store, shared: int
) -> None:
    first = a_turn(await a_session(store))
    await store.record_turn(first, scope=SCOPE)
    second = following(first, num_shared_ids=shared)
    wrong = second.prompt_ids.copy()
    wrong[1] += 1
    with pytest.raises(ValueError, match="not those of"):
        await store.record_turn(replace(second, prompt_ids=wrong), scope=SCOPE)
    await store.record_turn(second, scope=SCOPE)


@pytest.mark.parametrize(("shared", "length"), [(3, 3), (6, 6), (7, 6), (7, 8)])
async def test_a_wrong_length_of_the_parent_hides_no_other_ids(
    store: Store, shared: int, length: int
) -> None:
    first = a_turn(await a_session(store))
    await store.record_turn(first, scope=SCOPE)
    second = following(first, num_shared_ids=shared)
    wrong = second.prompt_ids.copy()
    wrong[1] += 1
    with pytest.raises(ValueError, match="not those of"):
        await store.record_turn(
            replace(second, prompt_ids=wrong), scope=SCOPE, parent_length=length
        )


async def test_ids_that_do_not_match_their_checksum_are_never_returned(store: Store) -> None:
    turn_id = await recorded(store)
    await store.writer.run(
        lambda connection: connection.execute(
            update(TokensRow).values(prompt_ids=np.array([1, 2, 3, 5]))
        )
    )
    with pytest.raises(StoreCorrupt, match="checksum"):
        await store.turn_tokens(turn_id)


async def test_each_turn_keeps_its_own_form_of_a_message(store: Store) -> None:
    """Reasoning and outer blanks are no part of a node's identity, but a prompt shows them."""
    thinking = {**ANSWER, "reasoning_content": "units?"}
    first = a_turn(await a_session(store), response=thinking)
    sibling = a_turn(
        first.session_id,
        messages=[{**USER, "content": " How warm is it?\n"}],
        response={**ANSWER, "reasoning_content": "other thoughts"},
    )
    reply = {"role": "user", "content": "no"}
    echoed = following(first, messages=[USER, ANSWER, reply])
    for turn in (first, sibling, echoed):
        record = await stored(store, turn)
        assert record.messages == turn.messages
        assert record.response == turn.response
    nodes = path_ids(SCOPE, [USER, ANSWER])
    siblings = await store.turns_by_response_node(SCOPE, nodes)
    assert [ref.turn_id for ref in siblings] == [first.turn_id, sibling.turn_id]


async def test_unknown_turns_are_named(store: Store) -> None:
    assert await store.turn("nobody") is None
    with pytest.raises(UnknownTurn, match="nobody"):
        await store.turn_tokens("nobody")
    with pytest.raises(UnknownTurn, match="nobody"):
        await store.turns([await recorded(store), "nobody"])
    assert await store.turns([]) == []
