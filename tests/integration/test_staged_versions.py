"""A guarded trainer with adapters and a real engine: a version answers the guard before it answers
anybody else, and one that fails never does.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opd.commands.policy_versions import list_versions
from opd.guard.metrics import GuardMetrics
from opd.guard.starting import guard_worker
from opd.guard.worker import GuardWorker
from opd.rehearsal.starting import Connections
from opd.run import config as run_config
from opd.run.config import RunConfig
from records.config import StoreConfig
from records.database import fail_points
from records.store import Store
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.served import STAGED_FILE, ServedFile
from rollout_bridge.engine.types import SamplingParams
from rollout_bridge.guard.checks import read_checks
from rollout_bridge.rendering.rendering import Rendering
from rollout_bridge.stop_order import read_stop
from tests.examples.shipped import MODEL
from tests.trainer.step.test_real_engine import roll_out
from tests.trainer.tiny import make_ready
from trainer.step.loop import EmbeddedTrainer

BATCH = 4
CANARY = '{"name": "greeting", "prompt": "Hello.", "matches": "."}\n'


def configured(folder: Path, url: str) -> RunConfig:
    """Only the limits on distance decide."""
    (folder / "canaries.jsonl").write_text(CANARY, encoding="utf-8")
    values: dict[str, Any] = {
        "model": str(MODEL),
        "store": {"url": StoreConfig.sqlite(folder / "records.db").url},
        "judge": {"base_url": f"{url}/v1", "model": str(MODEL)},
        "policy": {"url": url},
        "frozen": {"url": url},
        "scoring": {"top_k": 0},
        "trainer": {
            "rollout_batch_size": BATCH,
            "lora": {"rank": 4, "alpha": 8},
            "publish": "adapter",
            "learning_rate": 1e-6,
            "objective": {"name": "hindsight_opd"},
            "poll_interval_s": 0.05,
            "tensorboard": False,
        },
        "guard": {
            "canaries": str(folder / "canaries.jsonl"),
            "samples": 4,
            "start_samples": 4,
            "max_new_tokens": 8,
            "least_passed": 0.0,
            "gap_turns": 0,
            "max_longer": 1e3,
            "least_entropy": 0.0,
            "max_repeated": 1.0,
        },
    }
    return run_config.build(values)


@asynccontextmanager
async def connected(
    config: RunConfig, folder: Path, rendering: Rendering
) -> AsyncIterator[Connections]:
    """The store and the engine, as policy by what `folder` says is served, and as start model."""
    url, vocab = config.policy.base_url, rendering.vocab_size
    async with (
        await Store.open(config.store) as store,
        EngineClient(url, vocab_size=vocab, served=ServedFile(folder)) as policy,
        EngineClient(url, vocab_size=vocab) as base,
    ):
        to: Any = {"store": store, "questions": None, "policy": policy, "frozen": base}
        yield Connections(**to, rendering=rendering)


class Agent:
    """Asks all the time, and remembers which versions answered."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self.versions: list[str | None] = []

    async def ask(self) -> str | None:
        reply = await self._client.generate(
            np.arange(20, dtype=np.int32), SamplingParams(temperature=1.0, max_new_tokens=4)
        )
        self.versions.append(reply.weight_version)
        return reply.weight_version

    async def asks_during(self, guard: GuardWorker) -> None:
        check = asyncio.create_task(guard.look())
        while not check.done():
            await self.ask()
        await check


@asynccontextmanager
async def trained(
    config: RunConfig, folder: Path, store: Store, policy: EngineClient, **settings: Any
) -> AsyncIterator[EmbeddedTrainer]:
    trainer = await EmbeddedTrainer.open(
        store=store,
        config=config.trainer.model_copy(update=settings),
        run_folder=folder,
        model=config.model,
        engines={"policy": policy},
        guarded=True,
    )
    try:
        yield trainer
    finally:
        await trainer.close()


async def batch(store: Store, policy: EngineClient, first: int) -> None:
    numbers = range(first, first + BATCH)
    await make_ready(store, await asyncio.gather(*(roll_out(policy, n, 1.0) for n in numbers)))


async def test_a_version_serves_nobody_before_it_passed_and_never_if_it_fails(
    tmp_path: Path, policy_url: str, rendering: Rendering
) -> None:
    config, staged = configured(tmp_path, policy_url), ServedFile(tmp_path, STAGED_FILE)
    run_config.save(config, tmp_path / "config.toml")
    stop = asyncio.Event()
    async with connected(config, tmp_path, rendering) as connections:
        store, policy = connections.store, connections.policy
        agent = Agent(policy)

        def restarted() -> GuardWorker:
            return guard_worker(config, connections, folder=tmp_path, metrics=GuardMetrics())

        guard = restarted()
        await guard.look()
        async with trained(config, tmp_path, store, policy) as trainer:
            await batch(store, policy, 0)
            assert await trainer.step() is not None
            assert await agent.ask() == "0"
        # Trainer and guard end before the check: the next ones stage it again, and check it.
        async with trained(config, tmp_path, store, policy) as trainer:
            assert await trainer.step() is None
            assert await agent.ask() == "0"
            assert "waits for its check" in list_versions(tmp_path / "config.toml")
            guard = restarted()
            await agent.asks_during(guard)
            assert set(agent.versions) == {"0"}
            assert [row.staged for row in read_checks(tmp_path)] == [False, True]
            assert await trainer.step() is None
            assert await agent.ask() == "1"
            assert staged.current() is None
        agent.versions.clear()
        async with trained(config, tmp_path, store, policy, learning_rate=1.0) as trainer:
            await batch(store, policy, BATCH)
            assert await trainer.step() is not None
            await agent.asks_during(guard)
            found = read_checks(tmp_path)[-1]
            assert (found.version, found.staged) == (2, True)
            assert any("guard.max_kl" in one for one in found.breaches)
            order = read_stop(tmp_path)
            assert order is not None
            assert order.reason.startswith("the guard did not publish version 2: ")
            await trainer.run(stop)
            assert await agent.ask() == "1"
            serving = asyncio.create_task(trainer.serve_on(stop, when_done=False))
            async with asyncio.timeout(120):
                while await agent.ask() != "3":
                    await asyncio.sleep(0.05)
            stop.set()
            await serving
            assert trainer.manifest.restores == 1
            assert staged.current() is None
        assert set(agent.versions) == {"1", "3"}
        registry = guard._metrics.registry
        assert registry.get_sample_value("guard_not_published_total") == 1
        assert registry.get_sample_value("guard_withdrawn_total") == 0
        listed = list_versions(tmp_path / "config.toml").splitlines()
        assert listed[3].endswith("not published")


@pytest.mark.long
async def test_a_trainer_killed_while_it_stages_serves_nothing_unchecked(
    tmp_path: Path, policy_url: str, rendering: Rendering
) -> None:
    config, staged = configured(tmp_path, policy_url), ServedFile(tmp_path, STAGED_FILE)
    run_config.save(config, tmp_path / "config.toml")
    async with connected(config, tmp_path, rendering) as connections:
        store, policy = connections.store, connections.policy
        agent = Agent(policy)
        guard = guard_worker(config, connections, folder=tmp_path, metrics=GuardMetrics())
        await guard.look()
        await batch(store, policy, 0)
        trainer = await started(tmp_path, {fail_points.VARIABLE: "publish.staged:1"})
        assert await trainer.wait() == -signal.SIGKILL
        # The engine has the adapter; nothing names it, and the guard has nothing to check.
        assert len(await policy.adapters()) == 1
        assert (staged.current(), await agent.ask()) == (None, "0")
        await guard.look()
        assert [row.version for row in read_checks(tmp_path)] == [0]
        trainer = await started(tmp_path, {})
        try:
            async with asyncio.timeout(120):
                while staged.current() is None:
                    assert await agent.ask() == "0"
                await agent.asks_during(guard)
                assert set(agent.versions) == {"0"}
                while await agent.ask() != "1":
                    await asyncio.sleep(0.05)
        finally:
            trainer.terminate()
            await trainer.wait()
    assert [(row.version, row.staged) for row in read_checks(tmp_path)] == [(0, False), (1, True)]


async def started(folder: Path, environment: dict[str, str]) -> asyncio.subprocess.Process:
    """`opd train` on the run in `folder`."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "opd.cli.app", "train", "--run", str(folder)),
        env=os.environ | environment,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
