"""When generation is held for training, and that every way out ends it."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys

import pytest
from pydantic import ValidationError

from opd.report.terminal.held import held_line, held_summary
from records.names import DropReason, TurnState
from rollout_bridge.engine.hold_file import HoldFile, HoldOrder, HoldWriter
from rollout_bridge.stop_order import StopOrder, order_stop
from tests.trainer.local_engine import LocalEngine
from tests.trainer.step.test_loop import BATCH, opened, samples, until
from tests.trainer.tiny import make_ready, states
from trainer.config import TrainerConfig


class SlowEngine(LocalEngine):
    """Loads weights once `gate` is set; `held` is what generation heard meanwhile."""

    def __init__(self, path: str, run) -> None:
        super().__init__(path)
        self.gate = asyncio.Event()
        self.is_loading = asyncio.Event()
        self.file = HoldFile(run)
        self.held: list[HoldOrder | None] = []

    async def update_weights(self, path: str, version: str, *, flush_cache: bool = True) -> None:
        self.is_loading.set()
        await self.gate.wait()
        self.held.append(self.file.holds())
        await super().update_weights(path, version, flush_cache=flush_cache)
        self.held.append(self.file.holds())


def rows_of(run) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


async def test_sync_holds_from_a_full_batch_until_its_weights_are_served(folder, tmp_path):
    engine = SlowEngine(str(folder), tmp_path)
    engine.gate.set()
    async with opened(tmp_path, folder, engine, schedule="sync") as (trainer, store, _):
        await make_ready(store, samples(1))
        assert await trainer.step() is None
        assert engine.file.current() == "ended", "half a batch holds nobody"
        await make_ready(store, samples(2, first=1))
        assert await trainer.step() is not None
        assert [one and one.version for one in engine.held] == [0, 0]
        assert engine.file.current() == "ended"
        # What missed the batch was sampled by version 0.
        assert await states(store) == {TurnState.TRAINED: BATCH, TurnState.DROPPED: 2}
        assert await store.drops() == {DropReason.STALE: 2}
    [row] = rows_of(tmp_path)
    assert (row["staleness_min"], row["staleness_max"]) == (0, 0)
    assert (row["hold/holds"], row["hold/ended_served"]) == (1, 1)
    assert row["hold/seconds"] > 0
    assert held_summary([row]) == {
        "seconds": row["hold/seconds"],
        "holds": 1,
        "by_end": {"served": 1},
    }
    said = held_line(tmp_path)
    assert said is not None
    assert said.startswith("requests held: 1 times for ")


async def test_async_never_holds_and_trains_older_turns(folder, tmp_path):
    engine = SlowEngine(str(folder), tmp_path)
    engine.gate.set()
    async with opened(tmp_path, folder, engine) as (trainer, store, _):
        await make_ready(store, samples(4))
        assert await trainer.step() is not None
        assert await trainer.step() is not None
        assert engine.held == [None] * 4
    rows = rows_of(tmp_path)
    assert [row["staleness_max"] for row in rows] == [0, 1]
    assert held_summary(rows) is None
    assert held_line(tmp_path) is None


async def test_a_stop_order_during_the_step_ends_the_hold_at_once(folder, tmp_path):
    engine = SlowEngine(str(folder), tmp_path)
    async with opened(tmp_path, folder, engine, schedule="sync") as (trainer, store, _):
        await make_ready(store, samples(2))
        training = asyncio.create_task(trainer.run(asyncio.Event()))
        await engine.is_loading.wait()
        assert engine.file.holds() is not None
        order_stop(tmp_path, StopOrder(reason="obedience fell"))
        await until(lambda: engine.file.current() == "ended")
        assert not training.done(), "the step goes on"
        engine.gate.set()
        await training
        assert trainer.version == 1
    [row] = rows_of(tmp_path)
    assert row["hold/ended_stopped"] == 1


async def test_a_hold_ends_after_its_longest_time_and_the_step_goes_on(folder, tmp_path, caplog):
    engine = SlowEngine(str(folder), tmp_path)
    options = {"schedule": "sync", "max_hold_s": 0.3}
    async with opened(tmp_path, folder, engine, **options) as (trainer, store, _):
        await make_ready(store, samples(2))
        stop = asyncio.Event()
        training = asyncio.create_task(trainer.run(stop))
        await engine.is_loading.wait()
        await until(lambda: engine.file.current() == "ended")
        await asyncio.sleep(0.3)
        assert engine.file.current() == "ended", "none begins anew before the weights are served"
        engine.gate.set()
        await until(lambda: trainer.version == 1)
        stop.set()
        await training
    assert "longer than trainer.max_hold_s" in caplog.text
    [row] = rows_of(tmp_path)
    assert row["hold/ended_max_hold"] == 1


async def test_a_failed_step_ends_the_hold(folder, tmp_path):
    engine = SlowEngine(str(folder), tmp_path)
    async with opened(tmp_path, folder, engine, schedule="sync") as (trainer, store, _):
        await make_ready(store, samples(2))

        def fail(*_, **__):
            assert engine.file.holds() is not None
            raise RuntimeError("out of memory")

        trainer.updater.update = fail  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="out of memory"):
            await trainer.run(asyncio.Event())
    assert engine.file.current() == "ended"


async def test_step_off_holds_while_generation_is_so_far_ahead(folder, tmp_path):
    engine = SlowEngine(str(folder), tmp_path)
    options = {"schedule": "step_off", "steps_off": 1}
    async with opened(tmp_path, folder, engine, **options) as (trainer, store, _):
        await make_ready(store, samples(2))
        stop = asyncio.Event()
        training = asyncio.create_task(trainer.run(stop))
        await engine.is_loading.wait()
        await asyncio.sleep(0.3)
        assert engine.file.holds() is None, "one batch trains, the next may be sampled"
        await make_ready(store, samples(2, first=2))
        await until(lambda: engine.file.holds() is not None)
        engine.gate.set()
        await until(lambda: trainer.version == 2)
        await until(lambda: engine.file.current() == "ended")
        # A step is quicker than the next look at how far generation is ahead.
        since_the_last_step = trainer._holds.metrics()["hold/holds"]
        stop.set()
        await training
    rows = rows_of(tmp_path)
    assert [row["staleness_max"] for row in rows] == [0, 1]
    assert sum(row["hold/holds"] for row in rows) + since_the_last_step >= 1


async def test_step_off_trains_nothing_older_than_its_steps(folder, tmp_path):
    options = {"schedule": "step_off", "steps_off": 1}
    async with opened(tmp_path, folder, **options) as (trainer, store, _):
        await make_ready(store, samples(6))
        for _ in range(3):
            await trainer.step()
        assert trainer.version == 2
        assert await store.drops() == {DropReason.STALE: BATCH}


def test_a_killed_trainer_holds_nobody(tmp_path):
    program = """
import sys, time
from pathlib import Path
from rollout_bridge.engine.hold_file import HoldOrder, HoldWriter
HoldWriter(Path(sys.argv[1])).write(HoldOrder(version=1, why="", since=0, until=9e9))
print("written", flush=True)
time.sleep(60)
"""
    arguments = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"written\n"
        file = HoldFile(tmp_path)
        assert file.holds() == HoldOrder(version=1, why="", since=0, until=9e9)
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
    assert file.current() == "trainer_gone"
    HoldWriter(tmp_path)
    assert file.current() == "ended", "the next trainer takes it away"


def test_an_order_ends_by_itself(tmp_path):
    now = 5.0
    writer, file = HoldWriter(tmp_path), HoldFile(tmp_path, lambda: now)
    writer.write(HoldOrder(version=1, why="", since=0.0, until=6.0))
    assert file.holds() is not None
    now = 6.0
    assert file.current() == "max_hold"
    writer.remove()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "step_off"}, "step_off and steps_off belong together"),
        ({"schedule": "sync", "steps_off": 1}, "step_off and steps_off belong together"),
        ({"schedule": "step_off", "steps_off": 5}, "set max_staleness to at least as much"),
        ({"schedule": "later"}, "Input should be 'sync', 'step_off' or 'async'"),
    ],
)
def test_schedules_that_cannot_be(options, message):
    with pytest.raises(ValidationError, match=message):
        TrainerConfig(**options)
