"""What `opd records export` writes is what is read: the store's turns come back as they were."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from opd.replay.recordings.reading import detect_format
from opd.replay.recordings.recorded import RecordedTurn, RecordingFormat
from records.store import Store
from records.types import TurnRecord
from tests.opd.export.conftest import ARun
from tests.opd.export.test_files import a_conversation
from tests.opd.replay.recording_files import read, write_lines
from tests.records.builders import SCOPE, a_turn
from tests.records.new_store import new_store


async def _stored(store: Store) -> list[TurnRecord]:
    _, turn_ids = await a_conversation(store)
    return await store.turns(turn_ids)


def _same(read_again: RecordedTurn, stored: TurnRecord) -> None:
    assert read_again.messages == stored.messages
    assert read_again.tools == stored.tools
    assert read_again.response == stored.response
    assert read_again.next_state == stored.next_state
    tokens = read_again.tokens
    assert tokens is not None
    np.testing.assert_array_equal(tokens.prompt_ids, stored.prompt_ids)
    np.testing.assert_array_equal(tokens.response_ids, stored.response_ids)
    assert tokens.rollout_logprobs is not None
    np.testing.assert_array_equal(tokens.rollout_logprobs, stored.rollout_logprobs)


async def _with_switches(store: Store) -> list[TurnRecord]:
    session_id = await store.ensure_session(scope=SCOPE, external_id="switched")
    turns = []
    for value in (None, False, True):
        switch = {} if value is None else {"enable_thinking": value}
        turn = a_turn(session_id, sampling={"temperature": 1.0, **switch})
        await store.record_turn(turn, scope=SCOPE)
        turns.append(turn.turn_id)
    return await store.turns(turns)


def test_the_templates_switch_of_a_request_comes_back(tmp_path: Path) -> None:
    run = ARun(tmp_path, new_store(tmp_path / "records.db").url)
    run.fill(_with_switches)
    assert run.export("--what", "sessions").exit_code == 0
    path = run.out / "sessions.jsonl"
    sessions, _ = read(path)
    turns = [turn for session in sessions for turn in session.turns]
    assert [turn.enable_thinking for turn in turns] == [None, False, True]
    # What wrote no `sampling` set no switch.
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["turns"] = [{**json.loads(turn), "sampling": None} for turn in line["turns"]]
    sessions, _ = read(write_lines(tmp_path / "older.jsonl", lines))
    turns = [turn for session in sessions for turn in session.turns]
    assert [turn.enable_thinking for turn in turns] == [None, None, None]


def test_turns_of_a_store_come_back_as_they_were(tmp_path: Path) -> None:
    run = ARun(tmp_path, new_store(tmp_path / "records.db").url)
    stored = run.fill(_stored)
    result = run.export("--what", "sessions")
    assert result.exit_code == 0, result.output

    path = run.out / "sessions.jsonl"
    assert detect_format(path) is RecordingFormat.EXPORT
    sessions, problems = read(path)
    assert problems == []
    turns = [turn for session in sessions for turn in session.turns]
    assert [turn.parent for turn in turns] == [None, 0, None]
    assert [turn.votes is None for turn in turns] == [False, True, True]
    for read_again, turn in zip(turns, stored, strict=True):
        _same(read_again, turn)
