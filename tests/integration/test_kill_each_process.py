"""kill -9 of every process of a run while agents work: nothing is lost, nothing is trained twice.

The whole run is real: engines, proxy, judge worker and trainer as processes, scripted agents
through the official client. The witness is the chain of manifests, not the store's state column.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from examples.tool_lab.lab_config import LabConfig
from examples.tool_lab.learning import LearningState, learn
from examples.tool_lab.run_lab import LAB_VALUES, MODEL
from opd.processes.run import Run
from opd.run.config import RunConfig, merge
from opd.run.defaults import resolve, single_machine
from records.names import TurnState
from records.store import Store
from tests.opd.processes.pids import pids_of
from tests.records.looking import list_turns
from trainer.checkpoints.checkpoint import Checkpoints

pytestmark = [pytest.mark.long, pytest.mark.alone]

BATCH = 4
UPDATES_AFTER = 2
VICTIMS = ("judge", "trainer", "proxy", "engine_frozen", "engine_policy")
UNDER_WAY = (TurnState.JUDGING, TurnState.SCORING, TurnState.LEASED)


def configuration(folder: Path) -> RunConfig:
    values = merge(single_machine(str(MODEL), folder), LAB_VALUES)
    small = {
        "proxy": {"port": 0},
        # Votes of the killed engine must not be given up before it is back.
        "judge": {"loop": {"pause_max_s": 1.0, "claim_ttl_s": 5.0}},
        "scoring": {"loop": {"pause_max_s": 1.0, "claim_ttl_s": 5.0}},
        "trainer": {"rollout_batch_size": BATCH, "max_staleness": 100, "tensorboard": False},
    }
    return resolve(merge(values, small), None, [])


class EveryVictimKilled(Exception):
    """Each process was killed, and the run has made updates since the last kill."""


class Killer:
    """Kills the next victim whenever the run has made an update since the last kill.

    Raises EveryVictimKilled once `UPDATES_AFTER` updates were made after the last one.
    """

    def __init__(self, run: Run):
        self._run = run
        self._last_attempts = 0
        self.killed: list[str] = []
        self.work_at_kill: list[int] = []

    def __call__(self, state: LearningState) -> None:
        if len(self.killed) == len(VICTIMS):
            if state.attempts >= self._last_attempts + UPDATES_AFTER:
                raise EveryVictimKilled
            return
        if state.attempts <= self._last_attempts:
            return
        under_way = sum(state.turns.get(kind, 0) for kind in UNDER_WAY)
        if under_way == 0:
            return
        victim = VICTIMS[len(self.killed)]
        pid = pids_of(self._run.supervisor).get(victim)
        if pid is None:
            return
        os.kill(pid, signal.SIGKILL)
        self.killed.append(victim)
        self.work_at_kill.append(under_way)
        self._last_attempts = state.attempts


async def drained(store: Store, timeout_s: float) -> None:
    """Wait until no turn waits for judge or teacher and no full batch waits for the trainer."""
    async with asyncio.timeout(timeout_s):
        while True:
            counts = await store.counts()
            waiting = sum(counts[kind] for kind in UNDER_WAY)
            if waiting == 0 and counts[TurnState.READY] < BATCH:
                return
            await asyncio.sleep(0.2)


async def test_every_turn_is_trained_once_or_dropped_with_a_reason(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    # No number of updates ends it: several may be made between two looks at the store.
    lab = LabConfig(updates=10_000, sessions_in_flight=6, max_seconds=200, eval_samples=1)
    async with Run(config, tmp_path) as run, await Store.open(config.store) as store:
        await run.start_engines()
        await asyncio.gather(run.start_proxy(), run.start_learning())
        killer = Killer(run)
        with pytest.raises(EveryVictimKilled):
            await learn(
                base_url=f"http://{config.proxy.host}:{config.proxy.port}/v1",
                model=config.proxy.model_name,
                store=store,
                lab=lab,
                batch_size=BATCH,
                failed=run.supervisor.failed,
                why_stopped=lambda: None,
                is_held=lambda: False,
                progress=killer,
            )
        assert killer.killed == list(VICTIMS)
        # First who records: a reply that ends late begins a turn after all sessions are closed.
        await run.supervisor.stop("proxy")
        await store.close_idle_sessions(0.0)
        await drained(store, 60)
        await run.supervisor.stop("judge", "trainer")
        counts = await store.counts()
        turns = await list_turns(store, limit=100_000)
    chain = Checkpoints(tmp_path / "checkpoints", str(MODEL), config.trainer.seed).open()
    trained = Counter(turn_id for manifest in chain for turn_id in manifest.turn_ids)
    assert set(trained.values()) == {1}
    by_state = {turn.turn_id: turn.state for turn in turns}
    assert set(trained) == {key for key, state in by_state.items() if state is TurnState.TRAINED}
    assert all(turn.drop_reason for turn in turns if turn.state is TurnState.DROPPED)
    # Less than a batch is left over; everything else has ended.
    assert counts[TurnState.READY] < BATCH
    ended = counts[TurnState.TRAINED] + counts[TurnState.DROPPED] + counts[TurnState.READY]
    assert ended == len(turns)
    assert len(chain) - 1 >= len(VICTIMS) + UPDATES_AFTER
