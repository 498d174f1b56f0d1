"""Streams through a real server and the official client: chunks, records, disconnects."""

from __future__ import annotations

import asyncio
import time

import httpx
import openai
import orjson
import pytest

from api_proxy.reply import responses
from records.names import DropReason, TurnState
from rollout_bridge.engine.errors import EngineUnavailable
from tests.api_proxy.conftest import WEATHER, Door
from tests.records.looking import list_turns

USER = {"role": "user", "content": "hi"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


async def events(door: Door, messages: list[dict], **fields) -> list[dict | str]:
    """The data of a stream's events."""
    response = await door.post(messages, stream=True, **fields)
    assert response.headers["content-type"].startswith("text/event-stream")
    data = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [item if item == "[DONE]" else orjson.loads(item) for item in data]


async def test_official_client_reads_text(door: Door, agent: openai.AsyncOpenAI) -> None:
    door.will_say("Hello, world! How are you today?")
    stream = await agent.chat.completions.create(
        model="policy",
        messages=[USER],
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"session_id": "mine"},
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == "Hello, world! How are you today?"
    assert len([text for text in texts if text]) > 3
    assert chunks[-2].choices[0].finish_reason == "stop"
    turn = await door.turn(chunks[0].id.removeprefix("chatcmpl-"))
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(turn.response_ids)
    assert turn.response["content"] == "Hello, world! How are you today?"
    assert turn.state is TurnState.AWAITING_NEXT_STATE


async def test_official_client_assembles_tool_calls(door: Door, agent: openai.AsyncOpenAI) -> None:
    door.will_say("Let me see.\n" + CALL + "\n" + CALL.replace("Paris", "Rome"))
    async with agent.chat.completions.stream(
        model="policy", messages=[USER], tools=[WEATHER]
    ) as stream:
        async for _ in stream:
            pass
        completion = await stream.get_final_completion()
    message = completion.choices[0].message
    assert message.content == "Let me see."
    assert message.tool_calls is not None
    assert [call.function.arguments for call in message.tool_calls] == [
        '{"city": "Paris"}',
        '{"city": "Rome"}',
    ]
    assert completion.choices[0].finish_reason == "tool_calls"
    turn = await door.turn(completion.id.removeprefix("chatcmpl-"))
    assert turn.response["tool_calls"] == [
        call.model_dump(
            include={"id", "type", "function"}, exclude={"function": {"parsed_arguments"}}
        )
        for call in message.tool_calls
    ]


async def test_streamed_and_unstreamed_replies_store_the_same_tokens(door: Door) -> None:
    text = "<think>\nhm\n</think>\n\nLet me see.\n" + CALL
    door.will_say(text, text)
    whole, first = await door.say([USER], tools=[WEATHER])
    data = await events(door, [USER], tools=[WEATHER])
    second = await door.turn(data[0]["id"].removeprefix("chatcmpl-"))
    assert first.response_ids.tolist() == second.response_ids.tolist()
    assert first.rollout_logprobs.tolist() == second.rollout_logprobs.tolist()
    deltas = [item["choices"][0]["delta"] for item in data if item != "[DONE]"]
    assert "".join(delta.get("content", "") for delta in deltas) == whole["content"]
    assert (
        "".join(delta.get("reasoning_content", "") for delta in deltas)
        == whole["reasoning_content"]
    )


async def test_the_turn_is_committed_before_the_stream_ends(door: Door, served: str) -> None:
    door.will_say("Hello.")
    body = {"model": "policy", "messages": [USER], "stream": True}
    async with (
        httpx.AsyncClient(base_url=served) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                turn = await door.store.turn(response.headers["x-turn-id"])
                assert turn is not None


async def test_tokens_arrive_while_the_engine_samples(door: Door, served: str) -> None:
    door.will_say(door.line("Hello, world! How are you?", hang_at=4))
    body = {"model": "policy", "messages": [USER], "stream": True}
    async with (
        httpx.AsyncClient(base_url=served) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        async with asyncio.timeout(10):
            async for line in response.aiter_lines():
                if '"content":"H' in line:
                    break
    await _until(lambda: len(door.engine.aborted) == 1)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("hears_aborts", [True, False])
async def test_client_that_leaves(
    door: Door, served: str, stream: bool, hears_aborts: bool
) -> None:
    door.engine.hears_aborts = hears_aborts
    line = door.line("Hello, world! How are you today?", hang_at=5)
    door.will_say(line)
    body = {"model": "policy", "messages": [USER], "stream": stream}
    async with httpx.AsyncClient(base_url=served) as client:
        request = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await _until(lambda: len(door.engine.prompts) == 1)
        await asyncio.sleep(0.1)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    left = time.monotonic()
    await _until(lambda: len(door.engine.aborted) == 1)
    assert time.monotonic() - left < 1
    if not hears_aborts and not stream:
        await _until(lambda: door.engine.num_closed == 1)
        return
    await _until_async(lambda: _num_turns(door, 1))
    (turn,) = await list_turns(door.store)
    assert turn.drop_reason is DropReason.CLIENT_DISCONNECTED
    assert (await door.turn(turn.turn_id)).response_ids.tolist() == line.ids[:5]


async def test_client_that_leaves_while_the_store_is_slow(
    door: Door, served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_turn = door.store.record_turn
    num_calls = 0

    async def slow(*args, **kwargs) -> None:
        nonlocal num_calls
        num_calls += 1
        await asyncio.sleep(1)
        await record_turn(*args, **kwargs)

    monkeypatch.setattr(door.store, "record_turn", slow)
    door.will_say("Hello")
    body = {"model": "policy", "messages": [USER], "stream": True}
    async with httpx.AsyncClient(base_url=served) as client:
        request = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await _until(lambda: num_calls == 1)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    await _until_async(lambda: _num_turns(door, 1))
    await door.app.state.service.recorder.drain()
    assert num_calls == 1
    (turn,) = await list_turns(door.store)
    assert turn.drop_reason is None


async def test_client_that_leaves_before_the_first_token(door: Door, served: str) -> None:
    door.engine.gate = asyncio.Event()
    door.will_say("Hello")
    body = {"model": "policy", "messages": [USER], "stream": True}
    async with httpx.AsyncClient(base_url=served) as client:
        request = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await _until(lambda: len(door.engine.prompts) == 1)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    await _until(lambda: door.engine.num_closed == 0 and len(door.engine.aborted) == 1)
    assert await list_turns(door.store) == []


async def test_engine_that_dies_in_the_middle_is_continued(door: Door) -> None:
    line = door.line("Hello, world! How are you today?", fail_at=4)
    rest = door.line("")
    rest.ids = line.ids[4:]
    door.will_say(line, rest)
    data = await events(door, [USER])
    texts = [item["choices"][0]["delta"].get("content", "") for item in data[:-1]]
    assert "".join(texts) == "Hello, world! How are you today?"
    turn = await door.turn(data[0]["id"].removeprefix("chatcmpl-"))
    assert turn.response_ids.tolist() == line.ids
    assert turn.drop_reason is DropReason.UNKNOWN_VERSION


@pytest.mark.parametrize("settings", [{"max_continuations": 2}])
async def test_engine_that_dies_for_good_ends_the_stream_with_an_error(door: Door) -> None:
    door.will_say(door.line("Hello, world!", fail_at=4), *[EngineUnavailable("gone")] * 8)
    data = await events(door, [USER])
    assert data[-1]["error"]["code"] == "engine_unavailable"
    (turn,) = await list_turns(door.store)
    assert turn.drop_reason is DropReason.ABORTED


async def test_engine_down_before_the_first_token_keeps_its_status(door: Door) -> None:
    door.will_say(EngineUnavailable("gone"))
    response = await door.post([USER], stream=True)
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "server_error"


async def test_logprobs_list_every_sampled_token_once(door: Door) -> None:
    door.will_say("Let me see.\n" + CALL)
    data = await events(door, [USER], tools=[WEATHER], logprobs=True)
    tokens = [
        entry["token"]
        for item in data[:-1]
        if item["choices"][0]["logprobs"]
        for entry in item["choices"][0]["logprobs"]["content"]
    ]
    turn = await door.turn(data[0]["id"].removeprefix("chatcmpl-"))
    assert "".join(tokens) == door.rendering.decode(turn.response_ids)


async def test_held_weights_make_requests_wait(door: Door, agent: openai.AsyncOpenAI) -> None:
    door.engine.gate = asyncio.Event()
    door.will_say("Hello")
    request = asyncio.create_task(agent.chat.completions.create(model="policy", messages=[USER]))
    await _until(lambda: len(door.engine.prompts) == 1)
    assert not request.done()
    door.engine.gate.set()
    assert (await request).choices[0].message.content == "Hello"


async def test_a_long_wait_is_bridged_by_comments(
    door: Door, agent: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "_KEEP_ALIVE_S", 0.05)
    door.engine.gate = asyncio.Event()
    door.will_say("Hello")
    stream = await agent.chat.completions.create(model="policy", messages=[USER], stream=True)
    door.engine.gate.set()
    texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(texts) == "Hello"


async def _num_turns(door: Door, count: int) -> bool:
    return len(await list_turns(door.store)) == count


async def _until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def _until_async(condition) -> None:
    async with asyncio.timeout(10):
        while not await condition():
            await asyncio.sleep(0.01)
