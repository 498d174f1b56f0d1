"""Several answers to one request: each a turn of its own, one of which goes on."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from records.names import DropReason, TurnState
from rollout_bridge.engine.errors import EngineRejected, EngineUnavailable
from tests.api_proxy.conftest import Door
from tests.records.looking import list_turns

USER = {"role": "user", "content": "hi"}
TEXTS = ["Hello.", "Good day.", "Hi there."]


async def whole(door: Door, **fields) -> list[dict]:
    response = await door.post([USER], n=3, **fields)
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["id"] == f"chatcmpl-{body['choices'][0]['turn_id']}"
    assert response.headers["x-turn-id"] == body["choices"][0]["turn_id"]
    return body["choices"]


async def test_each_choice_is_a_turn(door: Door) -> None:
    door.will_say(*TEXTS)
    choices = await whole(door, seed=5)
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert sorted(choice["message"]["content"] for choice in choices) == sorted(TEXTS)
    assert [params.seed for params in door.engine.params] == [5, 6, 7]
    turns = [await door.turn(choice["turn_id"]) for choice in choices]
    assert len({turn.turn_id for turn in turns}) == 3
    assert len({turn.session_id for turn in turns}) == 1
    for choice, turn in zip(choices, turns, strict=True):
        assert turn.prompt_ids.tolist() == turns[0].prompt_ids.tolist()
        assert turn.response["content"] == choice["message"]["content"]
        said = door.rendering.decode(turn.response_ids[:-1])
        assert said == choice["message"]["content"]
        assert turn.state is TurnState.AWAITING_NEXT_STATE


async def test_the_choice_that_the_client_goes_on_with_gets_the_next_state(door: Door) -> None:
    door.will_say(*TEXTS, "Fine.")
    choices = await whole(door)
    chosen, *others = choices[1], choices[0], choices[2]
    thanks = {"role": "user", "content": "Thanks."}
    await door.say([USER, chosen["message"], thanks], session_done=True)
    linked = await door.turn(chosen["turn_id"])
    assert (linked.state, linked.next_state) == (TurnState.JUDGING, [thanks])
    for other in others:
        turn = await door.turn(other["turn_id"])
        assert turn.drop_reason is DropReason.NO_NEXT_STATE


async def test_a_session_that_is_done_ends_after_its_last_choice(door: Door) -> None:
    door.will_say(*TEXTS)
    for choice in await whole(door, session_done=True):
        assert (await door.turn(choice["turn_id"])).drop_reason is DropReason.NO_NEXT_STATE


async def test_choices_in_one_stream(door: Door) -> None:
    door.will_say(*TEXTS)
    response = await door.post(
        [USER],
        n=3,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=2,
    )
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert len({chunk["id"] for chunk in chunks}) == 1
    usage = chunks.pop()
    assert usage["choices"] == []
    texts, tops = ["", "", ""], [0, 0, 0]
    ends = []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        entries = (choice["logprobs"] or {"content": []})["content"]
        assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
        tops[choice["index"]] += len(entries)
        ends += [choice["index"]] if choice["finish_reason"] == "stop" else []
    assert sorted(texts) == sorted(TEXTS)
    assert sorted(ends) == [0, 1, 2]
    assert usage["usage"]["completion_tokens"] == sum(tops)
    turns = [await door.turn(ref.turn_id) for ref in await list_turns(door.store)]
    assert sorted(len(turn.response_ids) for turn in turns) == sorted(tops)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status"), [(EngineUnavailable("gone"), 503), (EngineRejected(400, "no"), 400)]
)
async def test_one_that_fails_ends_all(
    door: Door, stream: bool, error: Exception, status: int
) -> None:
    hanging = door.line("Hello.", hang_at=2)
    door.will_say(hanging, error, hanging)
    response = await door.post([USER], n=3, stream=stream)
    if stream and response.status_code == 200:
        assert '"error"' in response.text
        assert "[DONE]" not in response.text
    else:
        assert response.status_code == status
    assert len(door.engine.aborted) >= 2
    for turn in await list_turns(door.store):
        assert turn.drop_reason is DropReason.ABORTED


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_all(door: Door, served: str, stream: bool) -> None:
    door.will_say(*[door.line("Hello, world!", hang_at=3)] * 3)
    body = {"model": "policy", "messages": [USER], "n": 3, "stream": stream}
    async with httpx.AsyncClient(base_url=served) as client:
        request = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        async with asyncio.timeout(20):
            while len(door.engine.params) < 3:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            request.cancel()
            while len(door.engine.aborted) < 3:
                await asyncio.sleep(0.01)
            while len(turns := await list_turns(door.store)) < 3:
                await asyncio.sleep(0.01)
    assert {turn.drop_reason for turn in turns} == {DropReason.CLIENT_DISCONNECTED}
