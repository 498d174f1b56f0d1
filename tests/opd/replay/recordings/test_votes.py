from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from opd.replay.recordings.recorded import Problem
from opd.replay.recordings.votes import Votes, read_votes
from tests.opd.replay.recording_files import AIRLINE, AIRLINE_VOTES, read, write_lines


def test_real_votes_are_of_turns_of_the_real_sessions() -> None:
    votes = list(read_votes(AIRLINE_VOTES))
    sessions, _ = read(AIRLINE)
    turns = {(session.session_id, turn.position) for session in sessions for turn in session.turns}
    judged = [(vote.session_id, vote.position) for vote in votes if isinstance(vote, Votes)]
    assert len(judged) == len(votes) == 19
    assert set(judged) <= turns
    assert {session for session, _ in turns} - {session for session, _ in judged} == {
        "tau-airline-10-1"
    }
    assert all(len(vote.texts) == 3 for vote in votes if isinstance(vote, Votes))


def good(**fields: Any) -> dict[str, Any]:
    return {"session_id": "s", "message_index": 2, "votes": ["\\boxed{-1}"], **fields}


@pytest.mark.parametrize(
    "line",
    [
        good(session_id=None),
        good(message_index="2"),
        good(message_index=-1),
        good(message_index=True),
        good(votes=[]),
        good(votes="\\boxed{1}"),
        good(votes=["\\boxed{1}", None]),
        b"[]",
        b"{",
    ],
)
def test_bad_line_is_named_and_the_rest_goes_on(tmp_path: Path, line: Any) -> None:
    path = write_lines(tmp_path / "votes.jsonl", [good(), line, good(message_index=4)])
    first, problem, last = read_votes(path)
    assert first == Votes(1, "s", 2, ("\\boxed{-1}",))
    assert last == Votes(3, "s", 4, ("\\boxed{-1}",))
    assert isinstance(problem, Problem)
    assert problem.line == 2


def test_second_line_of_a_turn_is_a_problem(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "votes.jsonl", [good(), good(votes=["\\boxed{1}"])])
    first, problem = read_votes(path)
    assert isinstance(first, Votes)
    assert isinstance(problem, Problem)
    assert (problem.session_id, problem.position, problem.line) == ("s", 2, 2)


def test_judge_records_of_openclaw_rl_hold_votes(tmp_path: Path) -> None:
    accepted = {
        "session_id": "s",
        "turn": 3,
        "accepted": True,
        "hint": "Look twice.",
        "votes": [{"vote_id": 0, "score": 1, "hint": "Look twice.", "raw": "text \\boxed{1}"}],
    }
    scored = {"session_id": "s", "turn": 4, "score": 1.0, "votes": [1, "fail"]}
    votes, problem = read_votes(write_lines(tmp_path / "record_prm.jsonl", [accepted, scored]))
    assert votes == Votes(1, "s", 3, ("text \\boxed{1}",))
    assert isinstance(problem, Problem)
