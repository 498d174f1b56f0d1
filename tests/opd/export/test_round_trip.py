"""What an export holds is what its reader gives back."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

from opd.replay.importing import ImportSettings, prepare_session
from opd.replay.recordings.formats.export.sessions import read_export
from opd.replay.recordings.recorded import Problem, RecordedSession, RecordedTurn
from records.feedback.feedback import Feedback
from records.names import DropReason, TurnState, TurnType
from records.store import Store
from records.types import TurnRecord
from rollout_bridge.config import TeacherRoutes
from rollout_bridge.rendering.rendering import Rendering
from tests.opd.export.conftest import ARun
from tests.records.builders import (
    HINT,
    OWNER,
    REPLY,
    SCOPE,
    TRAINER,
    a_result,
    a_score,
    a_session,
    a_turn,
    a_verdict,
    a_version,
    a_vote,
    claimed,
    following,
)
from tests.records.looking import list_turns

TOOLS = [{"type": "function", "function": {"name": "warmth", "parameters": {}}}]
CALL = {"id": "c", "type": "function", "function": {"name": "warmth", "arguments": "{}"}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "21"}


async def a_tree(store: Store) -> tuple[str, list[str]]:
    """A session whose first turn was continued in two ways, one broken off; a side turn beside."""
    first = a_turn(await a_session(store), tools=TOOLS, response=CALLING)
    then = following(first, RESULT, tools=TOOLS, sampling={"temperature": 0.7})
    otherwise = following(first, RESULT, drop_reason=DropReason.ABORTED, response_ids=[3])
    side = a_turn(
        first.session_id, turn_type=TurnType.SIDE, drop_reason=DropReason.SIDE_TURN, sampling={}
    )
    await store.record_turn(first, scope=SCOPE)
    await store.set_next_state(first.turn_id, [RESULT])
    for turn in (then, otherwise, side):
        await store.record_turn(turn, scope=SCOPE)
    await store.set_next_state(then.turn_id, [REPLY])
    await store.add_feedback(SCOPE, then.turn_id, Feedback(text="Celsius!", external_id="one"))
    await claimed(store, TurnState.JUDGING)
    votes = (a_vote(0), a_vote(1, score=-1, hint="", text="\\boxed{-1}"))
    assert await store.commit_verdict(OWNER, a_verdict(first.turn_id, HINT, votes), None)
    assert await store.add_outcome(SCOPE, 0.25, None, session=first.session_id) is not None
    return first.session_id, [turn.turn_id for turn in (first, then, otherwise, side)]


def is_same(read: RecordedTurn, turn: TurnRecord) -> bool:
    assert read.tokens is not None
    assert read.tokens.prompt_ids.tolist() == turn.prompt_ids.tolist()
    assert read.tokens.response_ids.tolist() == turn.response_ids.tolist()
    assert (read.tools, read.response) == (turn.tools, turn.response)
    return (read.messages, read.next_state) == (turn.messages, turn.next_state)


def test_a_session_comes_back_as_it_was_recorded(a_run: ARun) -> None:
    session_id, turn_ids = a_run.fill(a_tree)
    turns = a_run.fill(lambda store: store.turns(turn_ids))
    assert a_run.export("--what", "sessions").exit_code == 0
    read = list(read_export(a_run.out / "sessions.jsonl"))
    [session] = [one for one in read if isinstance(one, RecordedSession)]
    assert session.session_id == session_id
    assert session.outcome_reward == 0.25
    assert [turn.position for turn in session.turns] == [0, 1, 2, 3]
    assert [turn.parent for turn in session.turns] == [None, 0, 0, None]
    for one, turn in zip(session.turns, turns, strict=True):
        assert is_same(one, turn)
    first, then, _, side = session.turns
    assert first.votes == (a_vote(0).text, "\\boxed{-1}")
    assert then.votes is None
    assert then.next_state[-1]["role"] == "feedback"
    assert then.tokens is not None
    assert then.tokens.temperature == 0.7
    assert then.tokens.rollout_logprobs is not None
    np.testing.assert_array_equal(then.tokens.rollout_logprobs, turns[1].rollout_logprobs)
    # Of a turn without a known temperature nothing says what its log-probs are of.
    assert side.tokens is not None
    assert side.tokens.rollout_logprobs is None
    assert [problem.position for problem in read if isinstance(problem, Problem)] == [3]


SOURCES = {"gsm8k": "math", "mbpp": "code"}
"""The teacher of each source."""


async def of_two_sources(store: Store) -> list[str]:
    """A session whose turns have different sources, each trained by the teacher of its own; its
    last turn names none and nobody scored it.
    """
    first = a_turn(await a_session(store), data_source="gsm8k", teacher_key="math")
    second = following(first, data_source="mbpp", teacher_key="code")
    last = following(second)
    for turn in (first, second, last):
        await store.record_turn(turn, scope=SCOPE)
    for number, turn in enumerate((first, second), start=1):
        assert await store.set_next_state(turn.turn_id, [REPLY])
        assert await claimed(store, TurnState.JUDGING) == [turn.turn_id]
        assert await store.commit_verdict(OWNER, a_verdict(turn.turn_id), None)
        assert await claimed(store, TurnState.SCORING) == [turn.turn_id]
        score = a_score(turn.turn_id, teacher=turn.teacher_key)
        assert await store.commit_scores(OWNER, [score])
        [leased] = await store.lease(owner=TRAINER, count=1, ttl_s=60.0)
        result = a_result(leased.turn_id)
        await store.commit_step(version=a_version(number), results=[result])
    return [first.turn_id, second.turn_id, last.turn_id]


def table(path: Path) -> list[dict[str, Any]]:
    """The rows of a file in either form, those of a session's line one by one."""
    if path.suffix == ".parquet":
        return parquet.read_table(path).to_pylist()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    if "turns" in lines[0]:
        return [json.loads(turn) for line in lines for turn in line["turns"]]
    return lines


@pytest.mark.parametrize("file_format", ["jsonl", "parquet"])
def test_turns_and_samples_name_their_source_and_teacher(a_run: ARun, file_format: str) -> None:
    turn_ids = a_run.fill(of_two_sources)
    assert a_run.export("--format", file_format).exit_code == 0
    names = ("turn_id", "data_source", "teacher_key", "teacher")
    taught = [
        (turn_id, source, teacher, teacher)
        for turn_id, (source, teacher) in zip(turn_ids[:2], SOURCES.items(), strict=True)
    ]
    turns = table(a_run.out / f"sessions.{file_format}")
    told = [tuple(row[name] for name in names) for row in turns]
    assert told == [*taught, (turn_ids[2], None, None, None)]
    samples = table(a_run.out / f"samples.{file_format}")
    assert [tuple(row[name] for name in names) for row in samples] == taught


def test_an_imported_turn_keeps_its_source_which_chooses_its_teacher(
    a_run: ARun, rendering: Rendering, tmp_path: Path
) -> None:
    a_run.fill(of_two_sources)
    assert a_run.export("--what", "sessions").exit_code == 0
    [session] = read_export(a_run.out / "sessions.jsonl")
    assert isinstance(session, RecordedSession)
    assert [turn.data_source for turn in session.turns] == ["gsm8k", "mbpp", None]
    # Routes of another run: its teachers have other names.
    routes = TeacherRoutes(sources={"gsm8k": "algebra"})
    settings = ImportSettings(context_length=4096, held_out=0.0, renderer="", routes=routes)
    other = ARun(tmp_path / "other", f"sqlite:///{tmp_path}/other.db")

    async def import_it(store: Store) -> list[TurnRecord]:
        prepared = prepare_session(session, rendering, store.redactor, settings, time.time())
        assert prepared.rows is not None
        await store.import_session(prepared.rows)
        return await store.turns([ref.turn_id for ref in await list_turns(store)])

    found = {(turn.data_source, turn.teacher_key) for turn in other.fill(import_it)}
    assert found == {("gsm8k", "algebra"), ("mbpp", None), (None, None)}
