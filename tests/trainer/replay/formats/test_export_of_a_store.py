"""What `opd records export` writes is what is read: the store's turns come back as they were."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from records.store import Store
from records.types import TurnRecord
from tests.trainer.export.conftest import ARun
from tests.trainer.export.test_files import a_conversation
from tests.trainer.replay.recordings import read
from trainer.replay.reading import detect_format
from trainer.replay.recorded import RecordedTurn, RecordingFormat


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


def test_turns_of_a_store_come_back_as_they_were(tmp_path: Path) -> None:
    run = ARun(tmp_path, f"sqlite:///{tmp_path}/records.db")
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
