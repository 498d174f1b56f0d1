"""What a client changed of an answer with calls: in linear time, and as it is defined."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from records.messages import EchoChange, Message, canonical_message, echo_changes
from tests.linear_time import growth

ARGUMENTS = st.sampled_from(
    [{}, {"a": 1}, {"a": 1.0}, {"a": True}, {"a": "1"}, {"a": [1, 2.5]}, "no JSON {", None]
)
CALLS = st.lists(st.tuples(st.sampled_from("xyz"), st.sampled_from("fg"), ARGUMENTS), max_size=7)


def message(calls: list[tuple[str, str, Any]], text: str = "") -> Message:
    return {
        "role": "assistant",
        "content": text,
        "tool_calls": [
            {"id": key, "type": "function", "function": {"name": name, "arguments": as_text(given)}}
            for key, name, given in calls
        ],
    }


def as_text(arguments: Any) -> Any:
    return json.dumps(arguments) if isinstance(arguments, dict) else arguments


def defined(sent: Message, shown: Message) -> tuple[EchoChange, ...] | None:
    """The definition: each shown call takes an equal one, that of its own id if there is one."""
    before, after = canonical_message(sent), canonical_message(shown)
    left = list(before.get("tool_calls", ()))
    changes: list[EchoChange] = []
    for call in after.get("tool_calls", ()):
        same = [
            one
            for one in left
            if (one["name"], one["arguments"]) == (call["name"], call["arguments"])
        ]
        if not same:
            return None
        named = next((one for one in same if one["id"] == call["id"]), None)
        if named is None and "ids" not in changes:
            changes.append("ids")
        left.remove(named or same[0])
    if not after.get("tool_calls"):
        return None
    if left:
        changes.append("calls")
    if before["content"] != after["content"]:
        changes.append("text")
    return tuple(changes)


@given(CALLS, CALLS, st.sampled_from(["", "text"]))
def test_any_two_answers_compare_as_defined(sent: list, shown: list, text: str) -> None:
    one, other = message(sent, text), message(shown)
    assert echo_changes(one, other) == defined(one, other)


@given(CALLS, st.randoms(use_true_random=False), st.integers(0, 7), st.booleans())
def test_a_rewritten_answer_compares_as_defined(sent: list, random, kept: int, rename) -> None:
    shown = random.sample(sent, min(kept, len(sent)))
    if rename:
        shown = [(random.choice("xyw"), name, arguments) for _, name, arguments in shown]
    one, other = message(sent), message(shown)
    assert echo_changes(one, other) == defined(one, other)


@pytest.mark.parametrize("rename", [False, True])
def test_the_time_grows_with_the_number_of_calls_and_not_its_square(rename: bool) -> None:
    def compare(count: int) -> Callable[[], None]:
        sent = message([(f"id{at}", "f", {"a": 1}) for at in range(count)])
        new = "new" if rename else "id"
        shown = message([(f"{new}{at}", "f", {"a": 1}) for at in range(count)])
        shown["tool_calls"].reverse()

        def work() -> None:
            assert echo_changes(sent, shown) == (("ids",) if rename else ())

        return work

    assert growth(compare(2_000), compare(8_000), below=6.6) < 6.6
