"""What a Messages request means as a chat completion."""

from __future__ import annotations

from typing import Any

import pytest

from api_proxy.errors import ApiError
from api_proxy.messages_api.request import UNPARSED_ARGUMENTS, chat_body

HI = {"role": "user", "content": "hi"}


def body(messages: list[dict], **fields: Any) -> dict[str, Any]:
    return {"model": "policy", "max_tokens": 50, "messages": messages, **fields}


def text(words: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **fields}


def call(call_id: str, value: dict) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "look", "input": value}


def result(call_id: str, content: Any = None, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **fields}


def messages_of(*messages: dict, **fields: Any) -> list[dict]:
    return chat_body(body(list(messages), **fields))["messages"]


def test_a_conversation_with_parallel_calls_and_thinking() -> None:
    reply = {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            text("Let me see."),
            call("a", {"x": "ü"}),
            call("b", {}),
        ],
    }
    answer = {"role": "user", "content": [result("a", "1"), result("b", [text("2")]), text("so?")]}
    assert messages_of(HI, reply, answer, system="Be kind.") == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": "a",
                    "type": "function",
                    "function": {"name": "look", "arguments": '{"x": "ü"}'},
                },
                {"id": "b", "type": "function", "function": {"name": "look", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
        {"role": "user", "content": "so?"},
    ]


def test_a_call_alone_has_no_content() -> None:
    (_, reply, _) = messages_of(
        HI,
        {"role": "assistant", "content": [call("a", {})]},
        {"role": "user", "content": [result("a", "1")]},
    )
    assert reply["content"] is None


def test_order_of_text_and_results_is_kept() -> None:
    content = [text("one"), result("a", "1"), text("two"), text("three")]
    messages = messages_of(HI, {"role": "user", "content": content})
    assert [message["role"] for message in messages] == ["user", "user", "tool", "user"]
    assert messages[-1]["content"] == [text("two"), text("three")]


def test_cache_control_and_bookkeeping_leave_no_trace() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    system = [text("x-anthropic-billing-header: cch=1;"), text("Be kind.", **cached)]
    messages = messages_of({"role": "user", "content": [text("hi", **cached)]}, system=system)
    assert messages == [{"role": "system", "content": "Be kind."}, HI]


def test_a_failed_call_without_output_says_that_it_failed() -> None:
    failed = {"role": "user", "content": [result("a", is_error=True)]}
    assert messages_of(HI, failed)[-1]["content"] == "error"
    told = {"role": "user", "content": [result("a", "no file", is_error=True)]}
    assert messages_of(HI, told)[-1]["content"] == "no file"


def test_arguments_that_were_no_object_come_back_as_they_were() -> None:
    reply = {"role": "assistant", "content": [call("a", {UNPARSED_ARGUMENTS: "{oops"})]}
    messages = messages_of(HI, reply, {"role": "user", "content": [result("a", "bad")]})
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == "{oops"


def test_fields_become_those_of_a_chat_completion() -> None:
    tool = {
        "name": "look",
        "description": "Looks.",
        "input_schema": {"type": "object"},
        "cache_control": {"type": "ephemeral"},
    }
    chat = chat_body(
        body(
            [HI],
            tools=[tool],
            tool_choice={"type": "tool", "name": "look", "disable_parallel_tool_use": True},
            stop_sequences=["END"],
            temperature=0.5,
            top_k=3,
            stream=True,
            metadata={"user_id": "me"},
            thinking={"type": "enabled", "budget_tokens": 2000},
            output_config={"effort": "high"},
            context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        )
    )
    function = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
    assert chat == {
        "model": "policy",
        "messages": [HI],
        "max_tokens": 50,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "parallel_tool_calls": False,
        "stop": ["END"],
        "temperature": 0.5,
        "top_k": 3,
        "stream": True,
        "user": "me",
    }


@pytest.mark.parametrize(
    ("given", "meant"), [("auto", "auto"), ("any", "required"), ("none", "none")]
)
def test_tool_choices(given: str, meant: str) -> None:
    assert chat_body(body([HI], tool_choice={"type": given}))["tool_choice"] == meant


def test_a_json_schema_is_asked_for() -> None:
    wanted = {"type": "json_schema", "schema": {"type": "object"}}
    chat = chat_body(body([HI], output_config={"format": wanted}))
    assert chat["response_format"]["json_schema"]["schema"] == {"type": "object"}


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}


@pytest.mark.parametrize(
    ("request_body", "words"),
    [
        ({"model": "policy", "messages": [HI]}, "max_tokens: Field required"),
        ({"max_tokens": 1, "messages": [HI]}, "model: Field required"),
        (body([]), "messages: List should have at least 1 item"),
        (body([{"role": "user"}]), "messages.0.content: Field required"),
        (body([{"role": "tool", "content": "x"}]), "messages.0: 'tool' is not supported"),
        (body([{"role": "user", "content": [IMAGE]}]), "messages.0.content.0 is an image"),
        (body([{"role": "user", "content": [result("a", [IMAGE])]}]), "content.0 is an image"),
        (body([{"role": "user", "content": [{"type": "document"}]}]), "is a document"),
        (body([HI, {"role": "assistant", "content": "{"}]), "prefilling"),
        (body([HI], tools=[{"type": "web_search_20250305", "name": "web_search"}]), "'web_search"),
        (body([HI], tools=[{"name": "look"}]), "'input_schema'"),
        (body([HI], tool_choice={"type": "tool"}), "tool_choice.name"),
        (body([HI], mcp_servers=[{"url": "x"}]), "mcp_servers"),
        (body([HI], context_management={"edits": [{"type": "compact_1"}]}), "'compact_1'"),
        (body([HI], output_config={"format": {"type": "xml"}}), "output_config.format"),
        (body([HI, {"role": "assistant", "content": [{"type": "redacted_thinking"}]}, HI]), "'red"),
    ],
)
def test_refusals_name_the_place(request_body: dict, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat_body(request_body)
    assert caught.value.status == 400
    assert words in caught.value.message


def test_counting_needs_no_budget() -> None:
    chat = chat_body({"model": "policy", "messages": [HI]}, needs_budget=False)
    assert "max_tokens" not in chat
