from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opd.replay.recordings.recorded import RecordingFormat
from tests.opd.replay.recording_files import read, texts, write_lines

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "dark"}

FIRST: dict[str, Any] = {
    "turn_id": "t1",
    "parent_turn_id": None,
    "position": 0,
    "messages": [{"role": "system", "content": "rules"}, {"role": "user", "content": "Look"}],
    "tools": [TOOL],
    "response": {"role": "assistant", "content": "", "tool_calls": [CALL]},
    "next_state": [RESULT, {"role": "feedback", "content": "well done"}],
    "prompt_ids": [1, 2, 3],
    "response_ids": [4, 5],
    "rollout_logprobs": [-0.5, -1.25],
    "temperature": 0.7,
    "version_spans": [[3, 0, 2]],
    "state": "trained",
    "votes": ["no \\boxed{-1}", "yes \\boxed{1}"],
    "hint": "Look twice.",
}
SECOND: dict[str, Any] = {
    "turn_id": "t2",
    "parent_turn_id": "t1",
    "position": 1,
    "shared_messages": 3,
    "messages": [RESULT],
    "response": {"role": "assistant", "content": "It is dark."},
    "next_state": [],
    "shared_ids": 5,
    "prompt_ids": [6],
    "response_ids": [7],
}


def line(*turns: Any, **fields: Any) -> dict[str, Any]:
    return {
        "format": "hindsight-opd-export",
        "version": 1,
        "session_id": "s",
        "outcome_reward": 0.5,
        "renderer": "qwen3:abc",
        "turns": list(turns),
        **fields,
    }


def test_turns_are_put_together_with_what_they_share(tmp_path: Path) -> None:
    (session,), problems = read(write_lines(tmp_path / "export.jsonl", [line(FIRST, SECOND)]))
    assert problems == []
    assert (session.session_id, session.format) == ("s", RecordingFormat.EXPORT)
    assert session.outcome_reward == 0.5
    first, second = session.turns
    assert (first.position, first.parent, second.position, second.parent) == (0, None, 1, 0)
    assert first.votes == ("no \\boxed{-1}", "yes \\boxed{1}")
    assert texts(first.next_state) == ["t:dark", "f:well done"]
    assert second.messages == [*FIRST["messages"], first.response, RESULT]
    assert second.tools == [TOOL]
    assert first.tokens is not None
    assert first.tokens.rollout_logprobs is not None
    np.testing.assert_array_equal(first.tokens.rollout_logprobs, np.float32([-0.5, -1.25]))
    assert (first.tokens.temperature, first.tokens.renderer) == (0.7, "qwen3:abc")
    assert second.tokens is not None
    assert second.tokens.prompt_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert second.tokens.prompt_ids.dtype == np.int32
    assert (second.tokens.rollout_logprobs, second.tokens.temperature) == (None, 1.0)
    assert second.votes is None
    assert [turn.problem for turn in session.turns] == [None, None]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"position": -1}, "turns[1]: position"),
        ({"position": 0}, "turn_id or position"),
        ({"turn_id": "t1"}, "turn_id or position"),
        ({"parent_turn_id": "gone"}, "'gone' was not taken in"),
        ({"parent_turn_id": ["t1"]}, "turns[1]: parent_turn_id"),
        ({"shared_messages": 4}, "shared_messages is 4, but its parent has 3"),
        ({"shared_ids": 6}, "shared_ids is 6"),
        ({"prompt_ids": None}, "must both be there, or neither"),
        ({"prompt_ids": [1.5]}, "turns[1]: prompt_ids.0"),
        ({"response_ids": [-1]}, "turns[1]: response_ids.0"),
        ({"rollout_logprobs": [-1.0, -2.0]}, "one rollout log-prob for each"),
        ({"rollout_logprobs": [None]}, "turns[1]: rollout_logprobs.0"),
        ({"temperature": 0}, "turns[1]: temperature"),
        ({"votes": [3]}, "turns[1]: votes.0"),
        ({"messages": {}}, "turns[1]: messages"),
        ({"response": None}, "turns[1]: response"),
        ({"tools": [1]}, "tools[0] has no function name"),
    ],
)
def test_turn_of_a_wrong_shape_is_left_out_alone(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    path = write_lines(tmp_path / "export.jsonl", [line(FIRST, {**SECOND, **change})])
    (session,), (problem,) = read(path)
    assert problem.reason.value == "bad_shape"
    assert says in problem.detail
    assert (problem.line, problem.session_id) == (1, "s")
    assert [turn.position for turn in session.turns] == [0]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"version": 3}, "version 3"),
        ({"session_id": ""}, "session_id"),
        ({"outcome_reward": "high"}, "outcome_reward"),
        ({"turns": None}, "turns"),
        ({"format": "other"}, "'format'"),
    ],
)
def test_line_of_a_wrong_shape_is_named_and_the_rest_goes_on(
    tmp_path: Path, fields: dict[str, Any], says: str
) -> None:
    lines = [line(FIRST, session_id="before"), line(FIRST, **fields), line(FIRST)]
    sessions, (problem,) = read(write_lines(tmp_path / "export.jsonl", lines))
    assert [session.session_id for session in sessions] == ["before", "s"]
    assert (problem.line, problem.reason.value) == (2, "bad_shape")
    assert says in problem.detail


def test_children_read_what_is_wrong_with_their_parents(tmp_path: Path) -> None:
    silent = {**FIRST, "response": {"role": "assistant", "content": ""}}
    side = {**SECOND, "turn_id": "t3", "position": 2, "turn_type": "side", "messages": []}
    late = {**SECOND, "turn_id": "t4", "position": 3, "parent_turn_id": "t3", "shared_messages": 4}
    path = write_lines(tmp_path / "export.jsonl", [line(silent, SECOND), line(FIRST, side, late)])
    (one, two), problems = read(path)
    assert [(p.line, p.position, p.reason.value) for p in problems] == [
        (1, 0, "empty_message"),
        (1, 1, "tool_result_without_call"),
        (2, 2, "side_turn"),
    ]
    assert [turn.problem for turn in one.turns] == [problems[0], problems[0]]
    assert [turn.problem for turn in two.turns] == [None, problems[2], None]


def test_session_without_a_turn_that_can_be_read(tmp_path: Path) -> None:
    sessions, problems = read(write_lines(tmp_path / "export.jsonl", [line(3), line()]))
    assert sessions == []
    assert [(p.line, p.reason.value) for p in problems] == [
        (1, "bad_shape"),
        (1, "no_assistant_turn"),
        (2, "no_assistant_turn"),
    ]


def test_ids_of_no_known_renderer_are_not_used(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "export.jsonl", [line(FIRST, renderer=None)])
    (session,), (problem,) = read(path)
    assert "'renderer' is null" in problem.detail
    assert session.turns[0].tokens is None
    assert session.turns[0].problem is None


def test_logprobs_of_another_distribution_are_not_used(tmp_path: Path) -> None:
    cut = {**FIRST, "distribution_modified": "top_p"}
    (session,), _ = read(write_lines(tmp_path / "export.jsonl", [line(cut)]))
    tokens = session.turns[0].tokens
    assert tokens is not None
    assert tokens.response_ids.tolist() == [4, 5]
    assert tokens.rollout_logprobs is None


def test_fault_of_the_last_next_state_is_named(tmp_path: Path) -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}
    path = write_lines(tmp_path / "export.jsonl", [line(FIRST, {**SECOND, "next_state": [image]})])
    (session,), (problem,) = read(path)
    assert (problem.reason.value, problem.position) == ("image", 1)
    assert [turn.problem for turn in session.turns] == [None, None]
