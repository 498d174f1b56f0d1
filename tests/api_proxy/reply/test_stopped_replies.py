"""Where a reply ends: stop strings in reasoning and in calls, calls that were never closed, and
what is counted of it.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from records.types import TurnRecord
from tests.api_proxy.conftest import WEATHER, Door

USER = {"role": "user", "content": "hi"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
OPEN = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par'


def joined(response: httpx.Response) -> dict[str, Any]:
    """The message and the finish reason of a reply, whole or streamed."""
    if "text/event-stream" not in response.headers["content-type"]:
        choice = response.json()["choices"][0]
        message = choice["message"]
        calls = [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
        return {
            "content": message["content"] or "",
            "reasoning": message.get("reasoning_content", ""),
            "calls": calls,
            "reason": choice["finish_reason"],
        }
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "reason": None}
    for line in response.text.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            delta = choice["delta"]
            found["content"] += delta.get("content") or ""
            found["reasoning"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    found["calls"].append("")
                found["calls"][-1] += call["function"]["arguments"]
            found["reason"] = choice["finish_reason"] or found["reason"]
    return found


async def reply(door: Door, stream: bool, **fields: Any) -> tuple[dict[str, Any], TurnRecord]:
    response = await door.post([USER], tools=[WEATHER], stream=stream, **fields)
    assert response.status_code == 200, response.text
    return joined(response), await door.turn(response.headers["x-turn-id"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how_far", ["<think>\nOne STOP", "<think>\nOne STOP two\n</think>\n\nHi."])
async def test_a_stop_string_in_the_reasoning_ends_the_reply(
    door: Door, stream: bool, how_far: str
) -> None:
    ends = how_far.endswith("STOP")
    door.will_say(door.line(how_far, end=not ends, matched="STOP" if ends else None))
    found, turn = await reply(door, stream, stop="STOP")
    assert found == {"content": "", "reasoning": "One", "calls": [], "reason": "stop"}
    assert "STOP" not in json.dumps(turn.response)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ["Let me see. " + OPEN, "Let me see. " + CALL])
async def test_a_stop_string_in_a_call_leaves_the_text_before_it(
    door: Door, stream: bool, text: str
) -> None:
    is_open = text.endswith("Par")
    door.will_say(door.line(text, end=not is_open, matched="Par" if is_open else None))
    found, turn = await reply(door, stream, stop="Par")
    assert found == {"content": "Let me see.", "reasoning": "", "calls": [], "reason": "stop"}
    assert "Par" not in json.dumps(turn.response)
    # The ids say more than was shown: the next prompt is not built on them.
    door.will_say("Fine.")
    _, after = await door.say([USER, turn.response, USER], tools=[WEATHER])
    assert after.parent_turn_id == turn.turn_id
    rendered = door.rendering.prompt_ids(after.messages, [WEATHER])
    if is_open:
        assert after.prompt_ids.tolist() == rendered.tolist()


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_before_a_stop_string_are_whole(door: Door, stream: bool) -> None:
    text = CALL + "\n" + OPEN.replace("Par", "Rom")
    door.will_say(door.line(text, end=False, matched="Rom"))
    found, _ = await reply(door, stream, stop="Rom")
    assert found["calls"] == ['{"city": "Paris"}']
    assert found["reason"] == "tool_calls"


async def test_a_call_that_was_never_closed_is_text(door: Door) -> None:
    door.will_say("See. " + OPEN)
    found, turn = await reply(door, stream=False)
    assert found["calls"] == []
    assert found["reason"] == "stop"
    assert found["content"].startswith("See.")
    assert '"city": "Par' in found["content"]
    door.will_say("Fine.")
    _, after = await door.say([USER, turn.response, USER], tools=[WEATHER])
    assert after.parent_turn_id == turn.turn_id


async def test_a_call_that_was_never_closed_and_was_streamed_does_not_end_as_tool_calls(
    door: Door,
) -> None:
    door.will_say("See. " + OPEN)
    found, turn = await reply(door, stream=True)
    assert found["calls"] == ['{"city": "Par']
    assert (found["reason"], found["content"]) == ("stop", "See.")
    assert turn.response["tool_calls"][0]["function"]["arguments"] == '{"city": "Par'


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_cut_at_the_budget_ends_as_length(door: Door, stream: bool) -> None:
    door.will_say(door.line(OPEN, end=False, finish_reason="length"))
    found, _ = await reply(door, stream)
    assert (found["calls"], found["reason"]) == (['{"city": "Par'], "length")


async def test_an_open_call_is_no_tool_use_in_the_words_of_anthropic(door: Door) -> None:
    tool = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}
    body = {"model": "policy", "max_tokens": 99, "messages": [USER], "tools": [tool]}
    door.will_say(OPEN, OPEN, door.line("See. " + OPEN, end=False, matched="Par"))
    message = (await door.client.post("/v1/messages", json=body)).json()
    assert message["stop_reason"] == "end_turn"
    assert [block["type"] for block in message["content"]] == ["text"]
    streamed = await door.client.post("/v1/messages", json={**body, "stream": True})
    assert '"stop_reason":"end_turn"' in streamed.text
    stopped = await door.client.post("/v1/messages", json={**body, "stop_sequences": ["Par"]})
    assert stopped.json()["stop_reason"] == "stop_sequence"
    assert stopped.json()["content"] == [{"type": "text", "text": "See."}]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_tokens_of_the_reasoning_are_counted(door: Door, stream: bool) -> None:
    door.will_say("<think>\nOne two\n</think>\n\nHi.")
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    response = await door.post([USER], stream=stream, **options)
    text = response.text if not stream else response.text.splitlines()[-4][6:]
    usage = json.loads(text)["usage"]
    turn = await door.turn(response.headers["x-turn-id"])
    end = turn.response_ids.tolist().index(door.rendering.reasoning_end_id)
    assert usage["completion_tokens_details"] == {"reasoning_tokens": end + 1}


async def test_the_bytes_of_tokens_within_a_character(door: Door) -> None:
    door.will_say("Grüße 東🙂")
    response = await door.post([USER], logprobs=True, top_logprobs=2)
    entries = response.json()["choices"][0]["logprobs"]["content"]
    whole = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert whole.decode() == "Grüße 東🙂<|im_end|>"
    parts = [entry for entry in entries if "\ufffd" in entry["token"]]
    assert parts
    replacement = list("\ufffd".encode())
    assert all(entry["bytes"] != replacement for entry in parts)
    assert all(len(entry["bytes"]) >= 1 for entry in parts)
