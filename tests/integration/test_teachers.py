"""A further teacher that the run starts itself, on two engines, scores the turns routed to it."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from pyarrow import parquet

from examples.tool_lab.run_lab import MODEL
from opd.run import config as run_config
from records.store import Store
from tests.opd.replay.recording_files import lab_recordings
from tests.records.looking import list_turns

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.long

VOTE = "It shows.\n\\boxed{1}\n[HINT_START]\nGive temperatures in Celsius.\n[HINT_END]"


async def opd(*arguments: object) -> None:
    """Run a command of the product; it must succeed."""
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "opd.cli.app", *map(str, arguments)],
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()


async def test_turns_are_scored_by_the_teacher_of_their_source(tmp_path: Path) -> None:
    sessions, votes = lab_recordings(tmp_path, ("Oslo", "Rome"), [VOTE])
    lines = [json.loads(line) for line in sessions.read_text().splitlines()]
    lines[0]["data_source"] = "north"
    sessions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = tmp_path / "run"
    settings = [
        f"teachers.second.embedded.model={MODEL}",
        "teachers.second.replicas=2",
        "scoring.routes.sources.north=second",
        "scoring.least_fall=0.0",
        "replay.held_out=0.0",
        "trainer.max_steps=1",
    ]
    words = [word for one in settings for word in ("--set", one)]
    await opd("replay", sessions, "--votes", votes, "--run", run, *words)
    config = run_config.load(run / "config.toml")
    async with await Store.open(config.store) as store:
        turns = await store.turns([ref.turn_id for ref in await list_turns(store, limit=99)])
        scores = [(turn, await store.score_of(turn.turn_id)) for turn in turns]
    found = {
        (turn.messages[1]["content"].removeprefix("What is the weather in "), score.teacher)
        for turn, score in scores
        if score is not None
    }
    assert found == {("Oslo?", "second"), ("Rome?", "teacher")}
    await opd("records", "export", "--run", run, "--out", tmp_path / "out", "--format", "parquet")
    names = ("session_name", "data_source", "teacher_key", "teacher")
    wanted = {("Oslo", "north", "second", "second"), ("Rome", None, None, "teacher")}
    exported = parquet.read_table(tmp_path / "out" / "sessions.parquet").to_pylist()
    assert wanted == {
        tuple(row[name] for name in names) for row in exported if row["teacher"] is not None
    }
    for number in (0, 1):
        log = run / "logs" / f"engine_second.{number}.log"
        assert log.exists(), sorted((run / "logs").iterdir())
