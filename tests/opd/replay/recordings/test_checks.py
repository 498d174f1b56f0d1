from __future__ import annotations

from typing import Any

import pytest

from opd.replay.recordings.checks import (
    FEEDBACK_ROLE,
    checked_message,
    checked_tools,
    results_without_calls,
)
from records.feedback.feedback import ROLE
from records.messages import canonical_message

CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}


def test_good_message_keeps_what_is_known() -> None:
    raw = {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [CALL],
        "refusal": None,
        "usage": {"tokens": 3},
    }
    assert checked_message(raw) == (
        {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "hm"},
        None,
    )


def test_arguments_that_are_an_object_become_text() -> None:
    raw = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    message, fault = checked_message(raw)
    assert fault is None
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a":1}'


def test_what_nests_too_deep_costs_its_call_or_the_tools() -> None:
    deep: dict[str, Any] = {}
    for _ in range(900):
        deep = {"a": deep}
    calls = [{"function": {"name": "f", "arguments": deep}}, CALL]
    message, fault = checked_message({"role": "assistant", "tool_calls": calls})
    assert fault is not None
    assert (fault.reason.value, "too deep" in fault.detail) == ("bad_tool_call", True)
    assert message["tool_calls"] == [CALL]
    tools, fault = checked_tools([{"name": "f", "parameters": deep}])
    assert tools == []
    assert fault is not None
    assert (fault.reason.value, "too deep" in fault.detail) == ("bad_shape", True)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (None, "bad_shape"),
        (["user", "hi"], "bad_shape"),
        ({"role": "critic", "content": "no"}, "unknown_role"),
        ({"content": "no"}, "unknown_role"),
        ({"role": ["user"], "content": "no"}, "unknown_role"),
        ({"role": "feedback", "content": "no"}, "unknown_role"),
        ({"role": "user", "content": {"text": "no"}}, "bad_shape"),
        ({"role": "user", "content": [{"type": "file", "file": {}}]}, "bad_shape"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "image"),
        ({"role": "tool", "tool_call_id": "c1", "content": [{"type": "image"}]}, "image"),
        ({"role": "user", "content": " \n"}, "empty_message"),
        ({"role": "user", "content": []}, "empty_message"),
        ({"role": "assistant"}, "empty_message"),
        ({"role": "assistant", "content": "x", "tool_calls": {"f": 1}}, "bad_tool_call"),
        ({"role": "assistant", "tool_calls": [{"name": "f"}]}, "bad_tool_call"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]},
            "bad_tool_call",
        ),
        ({"role": "assistant", "function_call": {"name": "f"}}, "bad_tool_call"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "bad_tool_call"),
    ],
)
def test_fault_is_named_and_what_is_left_can_be_stored(raw: Any, reason: str) -> None:
    message, fault = checked_message(raw)
    assert fault is not None
    assert fault.reason.value == reason
    assert canonical_message(message)["role"] == message["role"]


@pytest.mark.parametrize("role", ["system", "tool"])
def test_system_prompts_and_tool_results_may_be_empty(role: str) -> None:
    assert checked_message({"role": role, "content": ""})[1] is None


def test_image_leaves_a_word_in_its_place() -> None:
    parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    message, _ = checked_message({"role": "user", "content": parts})
    assert [part["text"] for part in message["content"]] == ["see", "[image]"]


def test_feedback_is_a_role_only_where_it_is_asked_for() -> None:
    assert FEEDBACK_ROLE == ROLE
    assert checked_message({"role": ROLE, "content": "good"}, feedback=True)[1] is None


def test_result_needs_an_earlier_call() -> None:
    result = {"role": "tool", "content": "1", "tool_call_id": "c1"}
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    nameless = {"role": "tool", "content": "2"}
    found = dict(results_without_calls([result, call, result, result, nameless]))
    assert sorted(found) == [0, 4]
    assert "'c1'" in found[0].detail
    assert "no tool_call_id" in found[4].detail


def test_tools_are_wrapped_or_refused() -> None:
    bare = {"name": "look", "parameters": {}}
    whole = {"type": "function", "function": bare}
    assert checked_tools(None) == ([], None)
    assert checked_tools([whole, bare]) == ([whole, whole], None)
    for raw in ({"look": {}}, [1], [{"type": "function"}], [{"function": {"name": 3}}]):
        tools, fault = checked_tools(raw)
        assert tools == []
        assert fault is not None
