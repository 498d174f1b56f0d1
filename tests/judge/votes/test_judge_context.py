"""A judge prompt that is too long loses its oldest middle messages and says so."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from judge.votes.context import (
    TEMPLATE_TOKENS,
    JudgePromptTooLong,
    estimate_tokens,
    fit_judge_prompt,
)
from judge.votes.prompts import SYSTEM, judge_messages, tool_signature

RESPONSE = {"role": "assistant", "content": "the response"}
NEXT_STATE = [{"role": "user", "content": "the next state"}]
# By far most texts here are words of prose; a length in characters is as good a count as any.
SLACK = len(SYSTEM) + 400


def conversation(count: int, size: int = 100, system: bool = True) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": "the rules"}] if system else []
    for i in range(count):
        role = "assistant" if i % 2 else "user"
        messages.append({"role": role, "content": f"message {i:03d} " + "x" * size})
    return messages


def fit(messages, max_tokens, response=RESPONSE, next_state=NEXT_STATE, count=len):
    return fit_judge_prompt(messages, [], response, next_state, max_tokens, count)


def test_the_prompt_tells_the_judge_that_tool_output_is_new_information():
    text = " ".join(SYSTEM.split())
    assert "The output of a successful tool call is new information" in text
    assert "NOT something that the assistant should have known" in text


@pytest.mark.parametrize(
    ("parameters", "line"),
    [
        (None, "find(): Find it."),
        ([], "find(): Find it."),
        ({"type": "object", "properties": None}, "find(): Find it."),
        (
            {"properties": {"a": True, "b": {"type": "string"}, "c": {}}},
            "find(a: any, b: string, c: any): Find it.",
        ),
    ],
)
def test_a_tool_whose_schema_is_odd_is_shown_all_the_same(parameters, line):
    function = {"name": "find", "description": "Find it.", "parameters": parameters}
    assert tool_signature({"type": "function", "function": function}) == line


def test_a_prompt_that_fits_is_shown_whole():
    messages = conversation(5)
    prompt = fit(messages, 100_000)
    assert prompt.num_omitted == 0
    assert prompt.messages == judge_messages(messages, [], RESPONSE, NEXT_STATE)


def test_a_prompt_below_the_limit_in_bytes_is_not_counted():
    def count(_text: str) -> int:
        raise AssertionError("no tokenizer is needed")

    assert fit(conversation(2), 100_000, count=count).num_omitted == 0


def test_the_oldest_middle_messages_go_and_the_prompt_says_so():
    messages = conversation(50)
    prompt = fit(messages, SLACK + 2000)
    text = prompt.messages[1]["content"]
    omitted = prompt.num_omitted
    assert 0 < omitted < 50
    assert f"[system] the rules\n[{omitted} earlier messages left out]\n" in text
    assert f"message {omitted - 1:03d}" not in text
    for kept in range(omitted, 50):
        assert f"message {kept:03d}" in text
    assert "the response" in text
    assert "the next state" in text


def test_hardly_more_is_left_out_than_necessary():
    messages = conversation(50)
    limit = SLACK + 2000
    prompt = fit(messages, limit)
    size = sum(len(m["content"]) for m in prompt.messages)
    assert size <= limit - TEMPLATE_TOKENS
    # Messages are left out by their own counts, without what joins them: one too many may go.
    two_more = judge_messages(
        [messages[0], *messages[prompt.num_omitted - 1 :]], [], RESPONSE, NEXT_STATE, 0, 1
    )
    assert sum(len(m["content"]) for m in two_more) > limit - TEMPLATE_TOKENS


def test_without_a_system_message_the_first_message_stays_as_the_task():
    prompt = fit(conversation(50, system=False), SLACK + 2000)
    text = prompt.messages[1]["content"]
    assert "message 000" in text
    assert "message 001" not in text
    assert f"[{prompt.num_omitted} earlier messages left out]" in text


def test_a_huge_system_message_is_replaced_by_its_length():
    messages = [{"role": "system", "content": "r" * 50_000}, {"role": "user", "content": "hi"}]
    prompt = fit(messages, SLACK + 2000)
    text = prompt.messages[1]["content"]
    assert "[system] [50000 characters left out]" in text
    assert prompt.num_omitted == 1


@pytest.mark.parametrize("where", ["response", "next_state"])
def test_a_response_or_next_state_over_the_limit_cannot_be_judged(where):
    huge = {"role": "tool", "content": "y" * 50_000}
    response = huge if where == "response" else RESPONSE
    next_state = [huge] if where == "next_state" else NEXT_STATE
    with pytest.raises(JudgePromptTooLong, match="exceeds the judge's prompt limit of 3000"):
        fit(conversation(3), 3000, response, next_state)


def test_an_empty_conversation_is_a_prompt_too():
    assert fit([], 100_000).num_omitted == 0
    with pytest.raises(JudgePromptTooLong):
        fit([], len(SYSTEM))


def test_tool_calls_and_lone_surrogates_are_counted():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "z" * 9000}}
    messages = [
        {"role": "user", "content": "\ud800 hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "ok"},
    ]
    prompt = fit(messages, SLACK + 1000)
    assert prompt.num_omitted == 1
    assert "[tool] ok" in prompt.messages[1]["content"]


@given(
    st.lists(st.text(max_size=200), max_size=12),
    st.integers(min_value=len(SYSTEM), max_value=len(SYSTEM) + 3000),
    st.booleans(),
)
def test_what_is_returned_always_fits(texts, limit, system):
    messages = [{"role": "system", "content": "rules"}] if system else []
    messages += [{"role": "user", "content": text} for text in texts]
    count = estimate_tokens
    try:
        prompt = fit(messages, limit, count=count)
    except JudgePromptTooLong:
        return
    assert sum(count(m["content"]) for m in prompt.messages) <= limit
    assert (prompt.num_omitted == 0) or ("left out" in prompt.messages[1]["content"])


def test_the_estimate_lies_between_half_the_bytes_and_all_of_them():
    assert estimate_tokens("") == 0
    assert estimate_tokens("a plain sentence") == 8
    assert estimate_tokens("0123456789") == 10
    assert estimate_tokens('{"a":1}') == 7
    assert estimate_tokens("提示") == 3


@given(st.text())
def test_the_estimate_never_exceeds_the_strict_bound(text):
    assert 0 <= estimate_tokens(text) <= len(text.encode("utf-8", "surrogatepass"))
