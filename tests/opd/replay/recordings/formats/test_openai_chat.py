from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from opd.replay.recordings.recorded import RecordingFormat
from tests.opd.replay.recording_files import AIRLINE, one, read, texts, write_lines

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def test_real_sessions_are_told_again_by_their_turns() -> None:
    sessions, problems = read(AIRLINE)
    assert problems == []
    raw = [json.loads(line) for line in AIRLINE.read_text().splitlines()]
    assert [session.session_id for session in sessions] == [line["session_id"] for line in raw]
    assert [session.line for session in sessions] == [1, 2, 3, 4]
    for session, line in zip(sessions, raw, strict=True):
        assert session.format is RecordingFormat.OPENAI_CHAT
        assert session.outcome_reward == line["outcome_reward"]
        answers = [
            i for i, message in enumerate(line["messages"]) if message["role"] == "assistant"
        ]
        assert [turn.position for turn in session.turns] == answers
        assert [turn.parent for turn in session.turns] == [None, *answers[:-1]]
        for turn, end in zip(session.turns, [*answers[1:], len(line["messages"])], strict=True):
            assert turn.problem is None
            assert turn.tools == line["tools"]
            told = [*turn.messages, turn.response, *turn.next_state]
            expected = line["messages"][:end]
            assert [m["role"] for m in told] == [m["role"] for m in expected]
            assert [m["content"] for m in told] == [m["content"] or "" for m in expected]
            assert [m.get("tool_calls") for m in told] == [m.get("tool_calls") for m in expected]
            assert len(turn.messages) == turn.position


def test_session_without_an_id_has_the_same_name_each_time(tmp_path: Path) -> None:
    lines: list[Any] = [{"messages": TALK}, {"messages": TALK, "session_id": 12}]
    sessions, _ = read(write_lines(tmp_path / "talks.jsonl", lines))
    assert [session.session_id for session in sessions] == ["talks-1", "12"]
    assert [session.outcome_reward for session in sessions] == [None, None]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"session_id": "s"}, "bad_shape"),
        ({"session_id": "s", "messages": {"role": "user"}}, "bad_shape"),
        ({"session_id": "s", "messages": []}, "no_messages"),
        ({"session_id": "s", "messages": TALK[:1]}, "no_assistant_turn"),
        (b'{"session_id": "s", "messages": [', "not_json"),
        (b'{"session_id": "\xfe", "messages": []}', "not_utf8"),
        (b"[]", "bad_shape"),
    ],
)
def test_bad_line_is_named_and_the_rest_goes_on(tmp_path: Path, line: Any, reason: str) -> None:
    good = {"session_id": "good", "messages": TALK}
    path = write_lines(tmp_path / "talks.jsonl", [good, line, {**good, "session_id": "too"}])
    sessions, problems = read(path)
    assert [session.session_id for session in sessions] == ["good", "too"]
    assert [(problem.line, problem.reason.value) for problem in problems] == [(2, reason)]


@pytest.mark.parametrize("field", [{"tools": {"f": 1}}, {"outcome_reward": "high"}])
def test_bad_field_of_a_session_is_left_out_and_named(
    tmp_path: Path, field: dict[str, Any]
) -> None:
    path = write_lines(tmp_path / "talks.jsonl", [{"session_id": "s", "messages": TALK, **field}])
    (session,), (problem,) = read(path)
    assert problem.reason.value == "bad_shape"
    assert next(iter(field)) in problem.detail
    assert (session.outcome_reward, session.turns[0].tools) == (None, [])
    assert session.turns[0].problem is None


def test_parts_of_text_stay_parts(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    talk = [{"role": "user", "content": parts}, TALK[1]]
    session = one(write_lines(tmp_path / "talks.jsonl", [{"messages": talk}]))
    assert session.turns[0].messages[0]["content"] == parts
    assert texts([session.turns[0].response]) == ["a:hello"]
