"""The plugin inside a real RolloutManager Ray actor: hands over, saves, dies, resumes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from records.config import StoreConfig
from records.names import TurnState
from records.store import Store
from tests.examples.shipped import MODEL
from tests.records.builders import a_session, a_turn, following, turn_in
from tests.rollout_bridge.slime.runs import run_values

# Each starts Ray and processes that import torch.
pytestmark = [pytest.mark.slime, pytest.mark.timeout(900)]

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    # Its router has no engines, so the calibration is asked for and left out.
    values = run_values(
        tmp_path,
        rollout_batch_size=4,
        handover={"max_wait_s": 1.0},
        renderer={"name": "qwen3", "enable_thinking": False},
        engine_client={"attempts": 1},
    )
    values["model"] = str(MODEL)
    (tmp_path / "config.toml").write_text(tomli_w.dumps(values))
    return tmp_path


def driven(run_in_slime: Run, run_folder: Path, version: int, *commands: str) -> list[Any]:
    done = run_in_slime(
        "-m", "tests.slime.rollout_manager", str(run_folder), str(version), *commands
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("REPLY ")]
    replies = [json.loads(line.removeprefix("REPLY ")) for line in lines]
    assert [reply["command"] for reply in replies] == list(commands)
    return replies


def turns_of(reply: Any) -> list[str]:
    rows = [row for rank in reply["ranks"] for row in rank["turns"]]
    return sorted(turn_id for row in rows for turn_id in row)


async def ready(store: Store, count: int) -> list[str]:
    return [await turn_in(store, TurnState.READY) for _ in range(count)]


async def states(config: StoreConfig, turn_ids: list[str]) -> list[TurnState]:
    async with await Store.open(config) as store:
        return [turn.state for turn in await store.turns(turn_ids)]


async def test_turns_are_handed_over_once_across_a_death_of_the_job(
    run_in_slime: Run, run_folder: Path
) -> None:
    config = StoreConfig.sqlite(run_folder / "records.db")
    async with await Store.open(config) as store:
        turn_ids = await ready(store, 6)

    first = driven(run_in_slime, run_folder, 0, "load:-1", "generate:0", "save:0", "generate:1")
    _, full, _, small = first
    assert turns_of(full) == sorted(turn_ids[:4])
    for rank in full["ranks"]:
        assert rank["global_batch_sizes"] == [4]
        assert rank["rollout_mask_sums"] == [3.0] * len(rank["turns"])
        assert rank["tokens"] == [[1, 2, 3, 4, 7, 8, 9]] * len(rank["turns"])
        assert rank["loss_masks"] == [[1, 1, 1]] * len(rank["turns"])
    ids = [one for rank in full["ranks"] for one in rank["rollout_ids"]]
    assert len(set(ids)) == 4
    # Two turns were left: after max_wait_s they went as a smaller step.
    assert turns_of(small) == sorted(turn_ids[4:])
    assert small["ranks"][0]["global_batch_sizes"] == [2]
    assert await states(config, turn_ids) == [TurnState.TRAINED] * 4 + [TurnState.LEASED] * 2
    engines = json.loads((run_folder / "engines.json").read_text())
    assert engines["policy"].startswith("http://")

    # The job ended here; slime's newest checkpoint is that of rollout 0.
    _, again, _ = driven(run_in_slime, run_folder, 3, "load:0", "generate:1", "save:1")
    assert turns_of(again) == sorted(turn_ids[4:])
    assert await states(config, turn_ids) == [TurnState.TRAINED] * 6


async def test_merged_turns_are_one_row_and_ranks_without_turns_get_padding(
    run_in_slime: Run, run_folder: Path
) -> None:
    config = StoreConfig.sqlite(run_folder / "records.db")
    async with await Store.open(config) as store:
        session_id = await a_session(store)
        turn = a_turn(session_id)
        later = following(turn)
        values = {name: getattr(turn, name) for name in ("turn_id", "session_id")}
        await turn_in(store, TurnState.READY, **values)
        changes = {name: getattr(later, name) for name in later.__slots__}
        await turn_in(store, TurnState.READY, **changes)

    replies = driven(run_in_slime, run_folder, 0, "load:-1", "generate:0", "generate:1", "save:1")
    _, merged, refresh, _ = replies
    rows = [
        (row, spans, tokens, mask)
        for rank in merged["ranks"]
        for row, spans, tokens, mask in zip(
            rank["turns"], rank["spans"], rank["tokens"], rank["loss_masks"], strict=True
        )
    ]
    [(_, spans, tokens, mask)] = [row for row in rows if row[0]]
    assert spans == [[4, 7, 0], [9, 12, 0]]
    assert tokens == [1, 2, 3, 4, 7, 8, 9, 5, 6, 7, 8, 9]
    assert mask == [1, 1, 1, 0, 0, 1, 1, 1]
    [(_, _, padding, padding_mask)] = [row for row in rows if not row[0]]
    assert (len(padding), padding_mask) == (2, [0])
    # Nothing was ready, and the first step could not reach the engines before a second came.
    assert turns_of(refresh) == []
    assert [rank["loss_masks"] for rank in refresh["ranks"]] == [[[0]], [[0]]]
    assert await states(config, [turn.turn_id, later.turn_id]) == [TurnState.TRAINED] * 2
