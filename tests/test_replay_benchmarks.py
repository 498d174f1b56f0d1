"""The benchmarks of replays: what they count is what they say, and they run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import replay_engine_tokens, replay_import, replay_merging
from benchmarks.recorded_sessions import distinct_tokens, replay_config
from rollout_bridge.rendering.rendering import Rendering
from tests.trainer.tiny import conversation, save_model

TREES = st.lists(st.lists(st.integers(0, 300), max_size=6), max_size=8)


@given(TREES)
def test_distinct_tokens_are_the_distinct_prefixes(sequences: list[list[int]]) -> None:
    prefixes = {tuple(ids[:end]) for ids in sequences for end in range(1, len(ids) + 1)}
    assert distinct_tokens([np.array(ids, dtype=np.int32) for ids in sequences]) == len(prefixes)


def test_merged_turns_are_counted_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = [
        *conversation("a", [(20, 5), (10, 5), (10, 5)], seed=1),
        *conversation("b", [(30, 5), (10, 5)], seed=2),
    ]
    assert replay_merging.counts(samples, batch=2, max_tokens=64) == 1.0
    told = capsys.readouterr().out
    assert "105 distinct tokens" in told  # 55 of session a, 50 of b
    assert f"{25 + 40 + 55 + 35 + 50:12,} tokens" in told  # a sequence per turn
    difference = replay_merging.compare(samples, save_model(tmp_path), max_tokens=64, rounds=1)
    assert difference < replay_merging.LARGEST_DIFFERENCE


def test_another_gradient_is_a_large_difference() -> None:
    a, b = torch.tensor([1.0, -4.0]), torch.tensor([1.0, -2.0])
    assert replay_merging.largest_difference([a], [b]) == 1.0


def test_an_import_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sessions.jsonl"
    replay_import.write_sessions(file, count=3, turns=2)
    parts = replay_import.parts_of(file, 2, tmp_path)
    url = f"sqlite:///{tmp_path / 'records.db'}"
    figures = replay_import.import_once(url, file, 3, tmp_path)
    assert figures.turns == figures.new == 6
    # Of each session at least itself, a node for each message it has, and its turns and tokens.
    assert figures.rows >= 3 * (1 + 5 + 2 + 2)
    assert parts.read > 0 < parts.render
    replay_import.report("SQLite", figures, 3, parts)
    assert "turns/s" in capsys.readouterr().out


async def test_engine_tokens_of_scores_and_votes_are_counted(
    tmp_path: Path, lab_engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file, votes = tmp_path / "sessions.jsonl", tmp_path / "votes.jsonl"
    replay_import.write_sessions(file, count=1, turns=3)
    vote = "\\boxed{1} [HINT_START]Answer in one short sentence, please.[HINT_END]"
    lines = [
        {"session_id": "session-0", "message_index": index, "votes": [vote]} for index in (2, 4, 6)
    ]
    votes.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    config = replay_config(tmp_path)
    rendering = Rendering.load(config.model, config.renderer)
    [session] = replay_engine_tokens.recorded_sessions(file, votes, config, rendering, 1)
    totals = await replay_engine_tokens.measure_scores(
        [session], config, rendering, tmp_path, lab_engine, lab_engine
    )
    for tokens in totals.values():
        assert 0 < tokens.least < tokens.asked
        assert 0 < tokens.computed < tokens.asked
    judge = config.judge.model_copy(update={"votes": 3, "max_tokens": 4})
    [votes_asked] = await replay_engine_tokens.measure_votes(
        [session], judge, rendering, tmp_path, lab_engine
    )
    assert votes_asked.asked == 3 * votes_asked.least
    assert 0 < votes_asked.computed < votes_asked.asked
    assert "session-0: 3 turns scored" in capsys.readouterr().out
