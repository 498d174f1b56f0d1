"""What a Responses request means as a chat completion."""

from __future__ import annotations

from typing import Any

import pytest

from api_proxy.errors import ApiError, invalid
from api_proxy.responses_api.request import Previous, chat_body, echo_of, parsed
from api_proxy.responses_api.routes import refusal

USER = {"role": "user", "content": "hi"}
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}


def chat(previous: Previous | None = None, **fields: Any) -> dict[str, Any]:
    body = {"model": "policy", "input": "hi", **fields}
    return chat_body(body, parsed(body), previous)


def test_fields_become_those_of_a_chat_completion() -> None:
    found = chat(
        instructions="Be kind.",
        tools=[LOOK],
        tool_choice={"type": "function", "name": "look"},
        parallel_tool_calls=False,
        max_output_tokens=50,
        temperature=0.5,
        top_p=0.9,
        stream=True,
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        reasoning={"effort": "high", "summary": "auto"},
        text={"verbosity": "low"},
        session_id="mine",
        service_tier="auto",
        prompt_cache_key="k",
        client_metadata={"a": 1},
    )
    assert found == {
        "session_id": "mine",
        "model": "policy",
        "messages": [{"role": "system", "content": "Be kind."}, USER],
        "temperature": 0.5,
        "top_p": 0.9,
        "stream": True,
        "parallel_tool_calls": False,
        "max_completion_tokens": 50,
        "logprobs": True,
        "tools": [
            {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
        ],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
    }


def test_instructions_go_before_the_conversation_so_far() -> None:
    previous = Previous(turn_id="t", messages=[USER, {"role": "assistant", "content": "yes"}])
    found = chat(previous, instructions="New.", input="so?")
    assert [message["role"] for message in found["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
    ]


def test_json_is_asked_for() -> None:
    form = {"type": "json_schema", "name": "answer", "schema": {"type": "object"}, "strict": True}
    assert chat(text={"format": form})["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True},
    }
    json_object = {"type": "json_object"}
    assert chat(text={"format": json_object})["response_format"] == json_object


def test_the_echo_holds_what_was_set() -> None:
    body = {
        "model": "policy",
        "input": "hi",
        "metadata": {"a": "b"},
        "temperature": 0,
        "user": None,
    }
    assert echo_of(body, parsed(body), 1.5, 1000) == {
        "api": "responses",
        "created_at": 1,
        "has_instructions": False,
        "model": "policy",
        "metadata": {"a": "b"},
        "temperature": 0,
    }


def test_more_than_is_repeated_is_refused() -> None:
    choice = {"type": "function", "name": "look", "more": "x" * 1000}
    body = {"model": "policy", "input": "hi", "tool_choice": choice, "tools": [LOOK]}
    with pytest.raises(ApiError, match="bytes; at most 1000"):
        echo_of(body, parsed(body), 1.0, 1000)


IMAGE = {"type": "input_image", "image_url": "http://x"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [LOOK, {"type": "custom", "name": "patch"}]}, "tools[1].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice"),
        ({"model": None}, "model"),
        ({"input": 3}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "local_shell_call"}]}, "input[0].type"),
        ({"input": [{"content": "x"}]}, "input[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"metadata": {"a": 1}}, "metadata.a"),
    ],
)
def test_refusals_name_the_field(fields: dict, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert caught.value.status == 400
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("param", "own"),
    [
        ("messages", "input"),
        ("messages[3].content", "input[3].content"),
        ("max_completion_tokens", "max_output_tokens"),
        ("tools[0].function", "tools[0].function"),
        (None, None),
    ],
)
def test_refusals_of_the_shared_path_have_this_apis_names(param: str, own: str) -> None:
    _, body = refusal(invalid("bad", param))
    assert body["error"]["param"] == own
