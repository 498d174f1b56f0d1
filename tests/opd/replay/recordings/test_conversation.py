from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from opd.replay.recordings.conversation import session_of
from opd.replay.recordings.entries import Entry, Origin, path_entries
from opd.replay.recordings.recorded import (
    ImportProblem,
    Problem,
    RecordedSession,
    RecordedTurn,
    RecordingFormat,
)
from tests.opd.replay.recording_files import texts

ORIGIN = Origin(session_id="s", format=RecordingFormat.OPENAI_CHAT, source="file", line=7)
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": {}}}


def said(role: str, content: str = "x", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def calls(*ids: str) -> list[dict[str, Any]]:
    return [
        {"id": i, "type": "function", "function": {"name": "look", "arguments": "{}"}} for i in ids
    ]


def made(entries: list[Entry], tools: tuple[Any, ...] = (TOOL,)) -> tuple[Any, list[Problem]]:
    found = list(session_of(entries, ORIGIN, tools=list(tools)))
    problems = [element for element in found if isinstance(element, Problem)]
    sessions = [element for element in found if isinstance(element, RecordedSession)]
    assert len(sessions) <= 1
    return (sessions[0] if sessions else None), problems


def turns(entries: list[Entry]) -> list[RecordedTurn]:
    session, problems = made(entries)
    assert not problems
    return list(session.turns)


def test_results_and_the_users_message_after_them_are_one_next_state() -> None:
    first, second = turns(
        path_entries(
            [
                said("system", "rules"),
                said("user", "go"),
                said("assistant", "", tool_calls=calls("a", "b")),
                said("tool", "1", tool_call_id="a"),
                said("tool", "2", tool_call_id="b"),
                said("user", "and?"),
                said("assistant", "done"),
            ]
        )
    )
    assert (first.position, first.parent) == (2, None)
    assert texts(first.messages) == ["s:rules", "u:go"]
    assert texts(first.next_state) == ["t:1", "t:2", "u:and?"]
    assert (second.position, second.parent) == (6, 2)
    assert texts(second.messages) == ["s:rules", "u:go", "a:", "t:1", "t:2", "u:and?"]
    assert second.next_state == []
    assert second.tools == [TOOL]


def test_answers_in_a_row_are_a_turn_each() -> None:
    first, second = turns(
        path_entries(
            [said("user", "go"), said("assistant", "1"), said("assistant", "2"), said("user", "ok")]
        )
    )
    assert first.next_state == []
    assert texts(second.messages) == ["u:go", "a:1"]
    assert texts(second.next_state) == ["u:ok"]


def test_problem_makes_unusable_only_the_turns_that_read_it() -> None:
    session, problems = made(
        path_entries(
            [
                said("user", "go"),
                said("assistant", "1"),
                {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
                said("assistant", "2"),
                said("tool", "3", tool_call_id="nobody"),
                said("assistant", ""),
            ]
        )
    )
    assert [(problem.position, problem.reason.value) for problem in problems] == [
        (2, "image"),
        (4, "tool_result_without_call"),
        (5, "empty_message"),
    ]
    assert str(problems[0]).startswith("file:7 session s message 2: image: ")
    assert [turn.problem for turn in session.turns] == [None, problems[0], problems[0]]
    assert session.turns[0].next_state[0]["content"] == [{"type": "text", "text": "[image]"}]


def test_message_of_nobody_knows_whom_is_no_next_state() -> None:
    session, problems = made(
        path_entries([said("user"), said("assistant"), said("critic", "bad"), None, said("user")])
    )
    assert [problem.reason.value for problem in problems] == ["unknown_role", "bad_shape"]
    assert texts(session.turns[0].next_state) == ["u:x"]
    assert session.turns[0].problem is None


def test_calls_without_tools_are_reported_once_and_train() -> None:
    entries = path_entries(
        [said("user"), said("assistant", tool_calls=calls("a")), said("tool", tool_call_id="a")]
    )
    session, problems = made(entries, tools=())
    assert [(p.reason, p.position) for p in problems] == [(ImportProblem.MISSING_TOOLS, None)]
    assert session.turns[0].problem is None
    assert made(path_entries([said("user"), said("assistant")]), tools=())[1] == []


def test_sessions_with_nothing_are_problems() -> None:
    assert [problem.reason.value for problem in made([])[1]] == ["no_messages"]
    session, problems = made(path_entries([said("user")]))
    assert session is None
    assert [problem.reason.value for problem in problems] == ["no_assistant_turn"]


def entry(position: int, parent: int | None, role: str, **more: Any) -> Entry:
    message = said(role, str(position))
    return Entry(position=position, parent=parent, message=message, **more)


def test_fork_gives_each_answer_once_and_the_first_way_on_as_next_state() -> None:
    found = turns(
        [
            entry(0, None, "user"),
            entry(1, 0, "assistant"),
            entry(2, 1, "user"),
            entry(3, 2, "assistant"),
            entry(4, 1, "user"),
            entry(5, 4, "assistant"),
        ]
    )
    assert [(turn.position, turn.parent) for turn in found] == [(1, None), (3, 1), (5, 1)]
    assert texts(found[0].next_state) == ["u:2"]
    assert texts(found[2].messages) == ["u:0", "a:1", "u:4"]


def test_summary_stands_for_what_is_before_it() -> None:
    found = turns(
        [
            entry(0, None, "user"),
            entry(1, 0, "assistant"),
            entry(2, 1, "user"),
            entry(3, 2, "assistant"),
            entry(4, 3, "user", is_summary=True, kept_from=2),
            entry(5, 4, "user"),
            entry(6, 5, "assistant"),
            entry(7, 6, "user", is_summary=True),
            entry(8, 7, "user"),
            entry(9, 8, "assistant"),
        ]
    )
    assert texts(found[1].next_state) == ["u:5"]
    assert (found[2].position, found[2].parent) == (6, 3)
    assert texts(found[2].messages) == ["u:4", "u:2", "a:3", "u:5"]
    assert texts(found[3].messages) == ["u:7", "u:8"]


def test_what_a_summary_leaves_behind_spoils_nothing() -> None:
    bad = path_entries([said("user"), said("assistant"), said("user", "")])
    session, problems = made(
        [*bad, entry(3, 2, "user", is_summary=True), entry(4, 3, "user"), entry(5, 4, "assistant")]
    )
    assert len(problems) == 1
    assert [turn.problem for turn in session.turns] == [None, None]


def test_answer_that_no_model_gave_is_context() -> None:
    found = turns(
        [
            entry(0, None, "user"),
            entry(1, 0, "assistant"),
            entry(2, 1, "assistant", is_sampled=False),
            entry(3, 2, "user"),
            entry(4, 3, "assistant"),
        ]
    )
    assert [turn.position for turn in found] == [1, 4]
    assert found[0].next_state == []
    assert texts(found[1].messages) == ["u:0", "a:1", "a:2", "u:3"]


ROLES = st.lists(st.sampled_from(["user", "assistant", "system"]), min_size=1, max_size=12)


@given(ROLES)
def test_prompt_response_and_next_state_tell_the_conversation_again(roles: list[str]) -> None:
    messages = [said(role, f"{index}") for index, role in enumerate(roles)]
    session, problems = made(path_entries(messages))
    if "assistant" not in roles:
        assert [problem.reason for problem in problems] == [ImportProblem.NO_ASSISTANT_TURN]
        return
    assert [turn.position for turn in session.turns] == [
        index for index, role in enumerate(roles) if role == "assistant"
    ]
    for turn in session.turns:
        told = [*turn.messages, turn.response, *turn.next_state]
        assert told == messages[: len(told)]
        assert len(turn.messages) == turn.position
        after = messages[len(told) :]
        assert not after or after[0]["role"] == "assistant"
