"""Records as OpenClaw-RL's API server writes them (`_buffer_record`, `_flush_pending_record`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opd.replay.recordings.recorded import RecordingFormat
from tests.opd.replay.recording_files import read, texts, write_lines

SYSTEM = {"role": "system", "content": "You are Ash, a home assistant."}
ASKED = {"role": "user", "content": [{"type": "text", "text": "Is the oven on?"}]}
CALL = {
    "id": "call_9f1",
    "index": 0,
    "type": "function",
    "function": {"name": "oven_state", "arguments": '{"room": "kitchen"}'},
}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_9f1", "content": "on, 180 C"}
HURRY = {"role": "user", "content": "Well?"}
ANSWER = {"role": "assistant", "content": "It is on, at 180 C."}
THANKS = {"role": "user", "content": "Switch it off."}

CALL_TEXT = (
    "<think>\nI have to look.\n</think>\n\n"
    '<tool_call>\n{"name": "oven_state", "arguments": {"room": "kitchen"}}\n</tool_call>'
    "<|im_end|>\n"
)


def record(session_id: str, turn: int, **fields: Any) -> dict[str, Any]:
    return {
        "session_id": session_id,
        "turn": turn,
        "timestamp": "2026-03-01 10:00:00",
        "messages": [SYSTEM, ASKED],
        "prompt_text": "<|im_start|>system\n...",
        "response_text": "It is on, at 180 C.<|im_end|>\n",
        "tool_calls": None,
        "next_state": None,
        **fields,
    }


FIRST = record("oven", 1, response_text=CALL_TEXT, tool_calls=[CALL], next_state=HURRY)
SECOND = record("oven", 2, messages=[SYSTEM, ASKED, CALLING, RESULT, HURRY], next_state=THANKS)


def test_records_of_mixed_sessions_become_sessions(tmp_path: Path) -> None:
    lamp = record("lamp", 1, next_state=THANKS)
    sessions, problems = read(write_lines(tmp_path / "record.jsonl", [FIRST, lamp, SECOND]))

    oven, other = sessions
    assert (oven.session_id, oven.line, oven.format) == ("oven", 1, RecordingFormat.OPENCLAW_RL)
    assert (other.session_id, other.line) == ("lamp", 2)
    assert [(p.reason.value, p.session_id) for p in problems] == [("missing_tools", "oven")]

    first, second = oven.turns
    assert (first.position, first.parent) == (1, None)
    assert first.response == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I have to look.",
        "tool_calls": [{k: CALL[k] for k in ("id", "type", "function")}],
    }
    # The record has the last message only; the next request has the tool's result before it.
    assert texts(first.next_state) == ["t:on, 180 C", "u:Well?"]
    assert (second.position, second.parent) == (2, 1)
    assert len(second.messages) == 5
    assert second.response == ANSWER
    assert texts(second.next_state) == ["u:Switch it off."]
    assert first.problem is None
    assert second.problem is None


def test_next_state_is_the_recorded_one_where_the_next_request_is_another(tmp_path: Path) -> None:
    rewritten = {**SECOND, "messages": [SYSTEM, THANKS]}
    (session,), _ = read(write_lines(tmp_path / "record.jsonl", [FIRST, rewritten]))
    assert texts(session.turns[0].next_state) == ["u:Well?"]


def test_session_that_counts_again_is_another(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "record.jsonl", [FIRST, SECOND, record("oven", 1)])
    sessions, _ = read(path)
    assert [(s.session_id, len(s.turns), s.line) for s in sessions] == [
        ("oven", 2, 1),
        ("oven#2", 1, 3),
    ]


def test_turn_behind_a_lost_one_continues_none(tmp_path: Path) -> None:
    lost = {key: value for key, value in SECOND.items() if key != "messages"}
    third = {**SECOND, "turn": 3}
    (session,), problems = read(write_lines(tmp_path / "record.jsonl", [FIRST, lost, third]))
    assert [(turn.position, turn.parent) for turn in session.turns] == [(1, None), (3, None)]
    assert texts(session.turns[0].next_state) == ["u:Well?"]
    assert [(p.line, p.reason.value) for p in problems] == [(2, "bad_shape"), (1, "missing_tools")]
    assert "openclaw-tinker" in problems[0].detail


def test_message_that_requests_repeat_is_reported_once(tmp_path: Path) -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
    records = [
        record("s", 1, next_state=image),
        record("s", 2, messages=[SYSTEM, ASKED, ANSWER, image], next_state=HURRY),
        record("s", 3, messages=[SYSTEM, ASKED, ANSWER, image, ANSWER, HURRY]),
    ]
    (session,), (problem,) = read(write_lines(tmp_path / "record.jsonl", records))
    assert (problem.reason.value, problem.position, problem.line) == ("image", 2, 2)
    assert problem.detail.startswith("messages[3]: ")
    assert [turn.problem for turn in session.turns] == [None, problem, problem]
    assert texts(session.turns[0].next_state)[0].startswith("u:")


def test_fault_of_the_last_next_state_is_reported(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "record.jsonl", [record("s", 1, next_state={"role": "x"})])
    (session,), (problem,) = read(path)
    assert (problem.reason.value, problem.position) == ("unknown_role", 1)
    assert session.turns[0].next_state == []
    assert session.turns[0].problem is None


def test_response_without_a_word_cannot_train(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "record.jsonl", [record("s", 1, response_text="<|im_end|>\n")])
    (session,), (problem,) = read(path)
    assert problem.reason.value == "empty_message"
    assert session.turns[0].problem is problem


def test_thoughts_that_the_prompt_opened_are_thoughts(tmp_path: Path) -> None:
    answer = record("s", 1, response_text="Let me see.\n</think>\n\nYes.<|im_end|>\n")
    (session,), _ = read(write_lines(tmp_path / "record.jsonl", [answer]))
    assert session.turns[0].response == {
        "role": "assistant",
        "content": "Yes.",
        "reasoning_content": "Let me see.",
    }


def test_lines_that_are_no_records_are_named(tmp_path: Path) -> None:
    bad = [record("s", 0), record("s", True), {**record("s", 1), "session_id": None}, b"{}"]
    bad.append({**record("s", 1), "response_text": None})
    sessions, problems = read(write_lines(tmp_path / "record.jsonl", [FIRST, *bad]))
    assert len(sessions) == 1
    assert [(p.line, p.reason.value) for p in problems[:-1]] == [
        (line, "bad_shape") for line in (2, 3, 4, 5, 6)
    ]
