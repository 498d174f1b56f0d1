"""What is kept as it is: steps of every kind, not only those that an agent takes most."""

from __future__ import annotations

from typing import Any

from records.types import TurnRecord
from tests.trainer.rehearsal.builders import a_state
from trainer.rehearsal.keeping import kinds_in_turn, step_kind


def calling(*names: str) -> dict[str, Any]:
    calls = [
        {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for name in names
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def a_call(turn_id: str, *names: str) -> TurnRecord:
    return a_state(turn_id, "Please do it.", response=calling(*names))


def an_answer(turn_id: str, to: str) -> TurnRecord:
    messages = [
        {"role": "user", "content": "Please do it."},
        calling(to),
        {"role": "tool", "tool_call_id": to, "content": "{}"},
    ]
    return a_state(turn_id, "", messages=messages)


def test_a_step_is_told_by_the_tools_that_it_calls_and_answers() -> None:
    assert step_kind(a_call("t", "search", "book")) == ((), ("book", "search"))
    assert step_kind(an_answer("t", to="search")) == (("search",), ())
    assert step_kind(a_state("t", "Hello.")) == ((), ())


def test_rare_kinds_come_as_often_as_frequent_ones() -> None:
    turns = [an_answer(f"often{number}", to="search") for number in range(4)]
    turns += [a_call("call0", "book"), a_call("call1", "book"), a_state("plain", "Hello.")]
    assert [turn.turn_id for turn in kinds_in_turn(turns)] == [
        "often0", "call0", "plain", "often1", "call1", "often2", "often3",
    ]  # fmt: skip
