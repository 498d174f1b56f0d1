"""The Messages door over a real store: same tree, same tokens, Anthropic's errors."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import numpy as np
import pytest

from records.names import DropReason
from rollout_bridge.engine.errors import EngineUnavailable
from tests.api_proxy.conftest import WEATHER, Door
from tests.records.looking import list_turns

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
FUNCTION = WEATHER["function"]
TOOL = {
    "name": FUNCTION["name"],
    "description": FUNCTION["description"],
    "input_schema": FUNCTION["parameters"],
}
USER = {"role": "user", "content": "hi"}


async def post(door: Door, path: str = "", headers: Any = None, **fields: Any) -> httpx.Response:
    body = {"model": "policy", "max_tokens": 100, "messages": [USER], **fields}
    return await door.client.post(f"/v1/messages{path}", json=body, headers=headers)


async def say(door: Door, **fields: Any) -> dict[str, Any]:
    response = await post(door, **fields)
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_tool_conversation_extends_its_tokens(door: Door) -> None:
    door.will_say("<think>\nhm\n</think>\n\nLet me see.\n" + CALL + "\n" + CALL, "Sunny.")
    reply = await say(door, tools=[TOOL], system="Help.")
    assert [block["type"] for block in reply["content"]] == [
        "thinking",
        "text",
        "tool_use",
        "tool_use",
    ]
    assert reply["stop_reason"] == "tool_use"
    calls = [block for block in reply["content"] if block["type"] == "tool_use"]
    assert calls[0]["input"] == {"city": "Paris"}
    results = [
        {"type": "tool_result", "tool_use_id": call["id"], "content": "sun"} for call in calls
    ]
    history = [
        USER,
        {"role": "assistant", "content": reply["content"]},
        {"role": "user", "content": results},
    ]
    after = await say(door, tools=[TOOL], system="Help.", messages=history)
    first = await door.turn(reply["id"].removeprefix("msg_"))
    second = await door.turn(after["id"].removeprefix("msg_"))
    assert second.parent_turn_id == first.turn_id
    assert second.session_id == first.session_id
    assert [message["role"] for message in first.next_state] == ["tool", "tool"]
    sampled = np.concatenate([first.prompt_ids, first.response_ids])
    assert second.prompt_ids[: len(sampled)].tolist() == sampled.tolist()
    assert after["content"] == [{"type": "text", "text": "Sunny."}]
    assert after["usage"]["input_tokens"] == len(second.prompt_ids)


async def test_a_conversation_goes_on_in_another_door(door: Door) -> None:
    door.will_say(CALL, "Sunny.", "Bye.")
    reply = await say(door, tools=[TOOL])
    (block,) = reply["content"]
    history: list[dict] = [
        USER,
        {"role": "assistant", "content": reply["content"]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": block["id"], "content": "sun"}],
        },
    ]
    first = await door.turn(reply["id"].removeprefix("msg_"))
    chat = [
        USER,
        first.response,
        {"role": "tool", "tool_call_id": block["id"], "content": "sun"},
    ]
    message, second = await door.say(chat, tools=[WEATHER])
    assert second.parent_turn_id == first.turn_id
    history += [{"role": "assistant", "content": message["content"]}, USER]
    third = await door.turn((await say(door, tools=[TOOL], messages=history))["id"][4:])
    assert third.parent_turn_id == second.turn_id
    sampled = np.concatenate([second.prompt_ids, second.response_ids])
    assert third.prompt_ids[: len(sampled)].tolist() == sampled.tolist()


async def test_an_unparsable_call_links_all_the_same(door: Door) -> None:
    door.will_say('<tool_call>\n{"name": "get_weather", "arguments": {"city": \n</tool_call>', "ok")
    reply = await say(door, tools=[TOOL])
    (block,) = reply["content"]
    history = [
        USER,
        {"role": "assistant", "content": [block]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": block["id"], "content": "bad"}],
        },
    ]
    after = await door.turn((await say(door, tools=[TOOL], messages=history))["id"][4:])
    assert after.parent_turn_id == reply["id"].removeprefix("msg_")


async def test_tool_choice_and_stop_sequences_reach_the_engine(door: Door) -> None:
    said = CALL.removeprefix("<tool_call>")
    door.will_say(said, door.line("a b", end=False, matched="END"))
    choice = {"type": "tool", "name": "get_weather"}
    reply = await say(door, tools=[TOOL], tool_choice=choice)
    assert reply["content"][0]["input"] == {"city": "Paris"}
    turn = await door.turn(reply["id"].removeprefix("msg_"))
    assert turn.drop_reason is DropReason.DISTRIBUTION_MODIFIED
    reply = await say(door, stop_sequences=["END"])
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "END")
    assert door.engine.params[1].stop == ("END",)


async def test_the_api_key_header_is_the_scope(door: Door) -> None:
    door.will_say("one", "two", "three")
    ids = [
        (await post(door, headers=headers)).json()["id"].removeprefix("msg_")
        for headers in ({"x-api-key": "k"}, {"Authorization": "Bearer k"}, {"x-api-key": "other"})
    ]
    turns = [await list_turns(door.store, (await door.turn(one)).session_id) for one in ids]
    assert all(len(refs) == 1 for refs in turns)
    history = [USER, {"role": "assistant", "content": "one"}, USER]
    door.will_say("again", "again")
    for headers, parent in (({"Authorization": "Bearer k"}, ids[0]), ({"x-api-key": "z"}, None)):
        reply = await post(door, headers=headers, messages=history)
        assert (await door.turn(reply.json()["id"][4:])).parent_turn_id == parent


async def test_tokens_are_counted_as_they_will_be_sent(door: Door) -> None:
    counted = await post(door, "/count_tokens", tools=[TOOL], system="Help.")
    door.will_say("ok")
    reply = await say(door, tools=[TOOL], system="Help.")
    assert counted.json() == {"input_tokens": reply["usage"]["input_tokens"]}
    assert len(door.engine.prompts) == 1


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"model": "gpt"}, 404, "not_found_error"),
        ({"messages": []}, 400, "invalid_request_error"),
        ({"temperature": 9}, 400, "invalid_request_error"),
        ({"session_id": "x" * 300}, 400, "invalid_request_error"),
    ],
)
async def test_refusals(door: Door, fields: dict, status: int, kind: str) -> None:
    for path in ("", "/count_tokens"):
        response = await post(door, path, **fields)
        assert response.status_code == status
        assert response.json()["type"] == "error"
        assert response.json()["error"]["type"] == kind
    assert (await door.client.get("/v1/messages")).json()["type"] == "error"
    assert (await door.client.post("/v1/messages", content=b"{")).json()["type"] == "error"


async def test_an_engine_that_is_away_is_an_overload(door: Door) -> None:
    door.will_say(EngineUnavailable("gone"), EngineUnavailable("gone"))
    for stream in (False, True):
        response = await post(door, stream=stream)
        assert response.status_code == 529
        assert response.headers["retry-after"] == "2"
        assert response.json()["error"]["type"] == "overloaded_error"


async def test_the_official_client_reads_a_stream(door: Door, served: str) -> None:
    door.will_say("<think>\nhm\n</think>\n\nLet me see.\n" + CALL)
    async with (
        anthropic.AsyncAnthropic(base_url=served, api_key="k", max_retries=0) as client,
        client.messages.stream(
            model="policy", max_tokens=50, messages=[USER], tools=[TOOL]
        ) as stream,
    ):
        kinds = [event.type async for event in stream]
        message = await stream.get_final_message()
    assert kinds.count("text") > 1
    assert message.stop_reason == "tool_use"
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    turn = await door.turn(message.id.removeprefix("msg_"))
    assert turn.response["reasoning_content"] == "hm"
    assert turn.response["tool_calls"][0]["id"] == message.content[2].id
    assert message.usage.output_tokens == len(turn.response_ids)


@pytest.mark.parametrize("settings", [{"max_continuations": 2}])
async def test_the_official_client_raises_what_breaks_a_stream(door: Door, served: str) -> None:
    door.will_say(door.line("Hello, world", fail_at=3), *[EngineUnavailable("gone")] * 8)
    async with (
        anthropic.AsyncAnthropic(base_url=served, api_key="k", max_retries=0) as client,
        client.messages.stream(model="policy", max_tokens=50, messages=[USER]) as stream,
    ):
        with pytest.raises(anthropic.APIStatusError):
            await stream.until_done()
