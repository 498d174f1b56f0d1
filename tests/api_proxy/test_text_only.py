"""Images and audio are refused by name and place, and `allowed_tools` restricts what is offered."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.api_proxy.conftest import WEATHER, Door

USER = {"role": "user", "content": "hi"}
TEXT = {"type": "text", "text": "see"}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        (
            "/v1/chat/completions",
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": "Yes?"},
                    {"role": "user", "content": [TEXT, {"type": "image_url", "image_url": {}}]},
                ]
            },
            "messages[2].content[1] is an image_url",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages[0].content[0] is an input_audio",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "tool", "tool_call_id": "c", "content": [{"type": "file"}]}]},
            "messages[0].content[0] is a file",
        ),
        (
            "/v1/chat/completions",
            {"messages": [USER, {"role": "assistant", "audio": {"id": "a"}}, USER]},
            "messages[1].audio is an audio",
        ),
        (
            "/v1/responses",
            {
                "input": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "input_text", "text": "see"},
                            {"type": "input_image", "image_url": "data:,"},
                        ],
                    }
                ]
            },
            "input[0].content[1] is an input_image",
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 9,
                "messages": [{"role": "user", "content": [TEXT, {"type": "image", "source": {}}]}],
            },
            "messages.0.content.1 is an image",
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 9,
                "messages": [
                    USER,
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "c",
                                "content": [{"type": "document"}],
                            }
                        ],
                    },
                ],
            },
            "messages.1.content.0.content.0 is a document",
        ),
    ],
)
async def test_what_is_no_text_is_named(
    door: Door, path: str, body: dict[str, Any], place: str
) -> None:
    response = await door.client.post(path, json={"model": "policy", **body})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == f"This model takes text only: {place}."
    assert door.engine.prompts == []


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


async def test_allowed_tools_are_the_ones_that_the_model_is_shown(door: Door) -> None:
    door.will_say(CALL)
    choice = allowed("auto", "get_weather")
    message, turn = await door.say([USER], tools=[WEATHER, TIME], tool_choice=choice)
    assert message["tool_calls"][0]["function"]["name"] == "get_weather"
    assert turn.tools == [WEATHER]
    assert turn.prompt_ids.tolist() == door.rendering.prompt_ids([USER], [WEATHER]).tolist()
    assert (turn.distribution_modified, turn.drop_reason) == (None, None)


async def test_one_of_the_allowed_tools_may_be_required(door: Door) -> None:
    door.will_say(CALL.removeprefix("<tool_call>"))
    choice = allowed("required", "get_weather")
    _, turn = await door.say([USER], tools=[WEATHER, TIME], tool_choice=choice)
    grammar = door.engine.params[0].grammar
    assert grammar is not None
    assert "get_weather" in grammar.text
    assert "get_time" not in grammar.text
    assert turn.distribution_modified == "grammar"


async def test_allowed_tools_of_responses(door: Door) -> None:
    door.will_say(CALL)
    tools = [{"type": "function", **tool["function"]} for tool in (WEATHER, TIME)]
    choice = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "get_weather"}],
    }
    body = {"model": "policy", "input": "hi", "tools": tools, "tool_choice": choice}
    response = await door.client.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["tool_choice"] == choice
    turn = await door.turn(response.headers["x-turn-id"])
    assert [tool["function"]["name"] for tool in turn.tools] == ["get_weather"]
    other = {**choice, "tools": [{"type": "mcp", "server_label": "x"}]}
    response = await door.client.post("/v1/responses", json={**body, "tool_choice": other})
    assert "may allow functions only, not 'mcp'" in json.dumps(response.json())


@pytest.mark.parametrize(
    "choice",
    [allowed("auto", "other"), allowed("auto"), allowed("none", "get_time")],
)
async def test_an_allowed_choice_that_makes_no_sense_is_refused(
    door: Door, choice: dict[str, Any]
) -> None:
    response = await door.post([USER], tools=[WEATHER, TIME], tool_choice=choice)
    assert response.status_code == 400
    assert "tool_choice" in response.json()["error"]["message"]
