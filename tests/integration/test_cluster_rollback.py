"""A cluster's run goes back to an older version. The launch, the job's side of the store, the
guard, the endpoint and the engines are real; Ray and slime's training are `cluster_python`.
"""

from __future__ import annotations

import asyncio
import io
import json
import shlex
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from opd.cluster.flag_check import REPOSITORY
from opd.cluster.launching.launched import Launch, _write
from opd.cluster.plan import make_plan
from opd.commands.policy_versions import list_versions, resume, roll_back
from opd.processes.supervisor import free_ports
from records.config import StoreConfig
from records.names import TurnState
from records.store import Store
from records.types import VersionSpan
from rollout_bridge.config import RendererConfig
from rollout_bridge.guard.checks import read_checks
from rollout_bridge.rendering.rendering import Rendering
from rollout_bridge.slime.handovers import HandoverLog, weight_start_version
from rollout_bridge.slime.saved import saved_rollouts
from rollout_bridge.stop_order import ROLLBACK_FILE, read_stop, why_stopped
from tests.contract.engine_process import embedded_engine
from tests.examples.shipped import MODEL
from tests.records.builders import USER, state_of, turn_in
from trainer.schedule.rollback_order import order_rollback

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
CANARIES = REPOSITORY / "examples" / "canaries" / "tool_lab.jsonl"
PATIENCE_S = 240.0


@pytest.fixture
def frozen_url() -> Iterator[str]:
    with embedded_engine(MODEL, "--seed", "0", "--weight-version", "frozen") as url:
        yield url


class Cluster:
    """A run that is launched, killed and launched again."""

    def __init__(self, run: Path, store: Store, overrides: list[str], port: int) -> None:
        self.run, self.store, self.overrides, self.port = run, store, overrides, port
        self.said = io.StringIO()
        self.asked: dict[str, Any] = {}
        """What the turns of `answered` were asked; without it, ids that mean nothing."""

    @property
    def config_file(self) -> Path:
        return self.run / "config.toml"

    @property
    def versions(self) -> list[int]:
        return [one.version for one in HandoverLog(self.run).newest_chain()]

    @asynccontextmanager
    async def launched(self) -> AsyncIterator[None]:
        config = self.run.with_name("cluster.toml")
        text = (REPOSITORY / "configs" / "qwen3_4b.toml").read_text()
        config.write_text(text.split("# From the model's config.json")[0])
        plan = make_plan(config, self.overrides, self.run)
        start_version = await weight_start_version(self.store, self.run)
        _write(plan, start_version)
        self.said = io.StringIO()
        console = Console(file=self.said, width=300)
        self.task = asyncio.create_task(
            Launch(plan, self.store, console, start_version=start_version).run()
        )
        try:
            await self.until(lambda: self.said.getvalue().count("ready: point") > 0)
            yield
        finally:
            self.task.cancel()
            with suppress(asyncio.CancelledError):
                await self.task

    async def until(self, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not ready():
            if self.task.done():
                self.task.result()
            assert time.monotonic() < deadline, self.said.getvalue()
            await asyncio.sleep(0.2)

    async def answered(self, count: int) -> list[str]:
        """Turns of the newest version, ready to train."""
        spans = (VersionSpan(version=self.versions[-1], start=0, end=3),)
        return [
            await turn_in(self.store, TurnState.READY, version_spans=spans, **self.asked)
            for _ in range(count)
        ]

    def answer(self) -> str:
        """The finish reason of an agent's turn."""
        body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        return self._asked("/v1/chat/completions", body)["choices"][0]["finish_reason"]

    def ready(self) -> dict[str, Any]:
        return self._asked("/readyz", None)

    def _asked(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        url = f"http://127.0.0.1:{self.port}{path}"
        with urllib.request.urlopen(
            urllib.request.Request(url, data, headers), timeout=60
        ) as reply:
            return json.loads(reply.read())

    async def trains(self, version: int) -> list[str]:
        """A batch of turns, of which a step makes `version`."""
        turn_ids = await self.answered(4)
        await self.until(lambda: self.versions[-1] == version)
        return turn_ids


@pytest.fixture
async def cluster(tmp_path: Path, policy_url: str, frozen_url: str) -> AsyncIterator[Cluster]:
    script = Path(__file__).with_name("cluster_python.py")
    python = tmp_path / "python3"
    python.write_text(
        f"#!/bin/sh\nexport STAND_IN_FOLDER={tmp_path} STAND_IN_ENGINE={policy_url} "
        f'STAND_IN_FROZEN={frozen_url}\nexec {shlex.join([sys.executable, str(script)])} "$@"\n'
    )
    python.chmod(0o755)
    [proxy] = free_ports(1)
    overrides = [
        f"model={MODEL}",
        f"cluster.python={python}",
        "cluster.slime_root=/nowhere/slime",
        "cluster.megatron_root=/nowhere/Megatron-LM",
        "cluster.save_interval=2",
        "cluster.actor.tensor_parallel=1",
        "trainer.schedule=sync",
        "trainer.rollout_batch_size=4",
        "trainer.epochs_per_batch=1",
        "handover.poll_interval_s=0.05",
        "rehearsal.enabled=false",
        f"proxy.port={proxy}",
    ]
    run = tmp_path / "run"
    run.mkdir()
    async with await Store.open(StoreConfig.sqlite(run / "records.db")) as store:
        yield Cluster(run, store, overrides, proxy)


async def states(store: Store, turn_ids: list[str]) -> set[TurnState]:
    return {await state_of(store, turn_id) for turn_id in turn_ids}


async def test_a_job_at_work_is_started_again_from_an_older_checkpoint(cluster: Cluster) -> None:
    run, store = cluster.run, cluster.store
    async with cluster.launched():
        trained = [one for version in range(2, 7) for one in await cluster.trains(version)]
        assert saved_rollouts(run / "checkpoints") == [1, 3]
        said = roll_back(cluster.config_file, 4)
        assert "the launch ends the job after its step" in said
        assert "steps apart: version 4; " in said
        assert "withdrawn: versions 5 to 6; " in said
        await cluster.until(lambda: cluster.said.getvalue().count("ready: point") == 2)
        assert "version 7 is served: it restores version 3" in cluster.said.getvalue()
        assert not (run / ROLLBACK_FILE).exists()
        # Versions 4 to 6 were served, 6 without a checkpoint.
        assert await states(store, trained) == {TurnState.TRAINED}
        assert await store.versions_given_up() == {4, 5, 6}
        assert saved_rollouts(run / "checkpoints") == [1]
        again = await cluster.trains(8)
        assert cluster.answer() in ("stop", "length")
    log = (run / "launch-002" / "slime.log").read_text()
    assert "--ckpt-step 1 --ref-ckpt-step 0" in log
    lines = {line.split()[0]: line for line in list_versions(cluster.config_file).splitlines()}
    assert list(lines) == ["version", "1", "2", "3", "4", "5", "6", "7", "8"]
    assert lines["6"].endswith("none     withdrawn")
    assert lines["7"].endswith("kept     restores version 3")
    # A later job begins with what was gone back to: step 8 has no checkpoint yet.
    async with cluster.launched():
        await cluster.until(lambda: cluster.versions[-1] == 10)
        assert cluster.versions == [1, 2, 3, 4, 5, 6, 7, 9, 10]
        assert await states(store, trained) == {TurnState.TRAINED}
        assert HandoverLog(run).newest_chain()[-1].turn_ids == tuple(again), "they train again"


async def test_an_order_is_followed_at_the_start_and_once(cluster: Cluster) -> None:
    run = cluster.run
    async with cluster.launched():
        trained = [one for version in (2, 3, 4) for one in await cluster.trains(version)]
    roll_back(cluster.config_file, 3)
    async with cluster.launched():
        assert "version 5 is served: it restores version 3" in cluster.said.getvalue()
        assert cluster.versions == [1, 2, 3, 4, 5]
        assert await states(cluster.store, trained) == {TurnState.TRAINED}
    # As if killed between the record and the end of the order.
    (run / ROLLBACK_FILE).write_text("3 4\n")
    async with cluster.launched():
        assert cluster.versions == [1, 2, 3, 4, 5, 6]
        assert HandoverLog(run).newest_chain()[-1].restores is None
        assert not (run / ROLLBACK_FILE).exists()
        await cluster.trains(7)
        order_rollback(run, 99)
        await cluster.until(lambda: "no rollback: " in cluster.said.getvalue())
        assert "version 99 is not in the chain" in cluster.said.getvalue()
        assert not (run / ROLLBACK_FILE).exists()
        await cluster.trains(8)


async def test_a_version_that_fails_its_canaries_is_withdrawn_and_training_stops(
    cluster: Cluster,
) -> None:
    run, store = cluster.run, cluster.store
    cluster.overrides += [
        f"guard.canaries={CANARIES}",
        "guard.samples=2",
        "guard.start_samples=4",
        # Without it, too, a version is checked before it is trained further.
        "trainer.schedule=async",
        "scoring.teacher=start",  # as the scores of these turns say
    ]
    rendering = Rendering.load(str(MODEL), RendererConfig(name="qwen3", enable_thinking=False))
    cluster.asked = {"messages": [USER], "prompt_ids": rendering.prompt_ids([USER])}
    write_spoiled(run / "spoiled")
    (run / "spoil").write_text("4")
    async with cluster.launched():
        trained = [one for version in (2, 3, 4) for one in await cluster.trains(version)]
        await cluster.until(lambda: cluster.said.getvalue().count("ready: point") == 2)
        assert "version 5 is served: it restores version 3" in cluster.said.getvalue()
        assert "training stays stopped: the guard withdrew version 4" in cluster.said.getvalue()
        reason = why_stopped(run)
        assert reason is not None
        assert reason.startswith("the guard withdrew version 4: 0 of ")
        order = read_stop(run)
        assert order is not None
        assert order.serve_version is None
        assert cluster.ready()["training_stopped"] == "the guard withdrew version 4"
        assert await states(store, trained) == {TurnState.TRAINED}
        assert await store.versions_given_up() == {4}
        await cluster.until(lambda: read_checks(run)[-1].version == 5)
        assert read_checks(run)[-1].breaches == []
        checks = {row.version: row for row in read_checks(run)}
        said = " ".join(checks[4].breaches)
        for name in ("least_passed", "max_kl", "max_kl_last", "max_gap_rise"):
            assert f"(guard.{name})" in said
        # The rollback's process read the answers of version 3, whose weights version 5 has.
        for version, good in ((3, 2), (5, 3)):
            assert checks[version].last_good == good
            assert checks[version].kl_last == pytest.approx(0.0, abs=1e-3)
            gap, of_start = checks[version].gap, checks[version].gap_start
            assert gap is not None
            assert of_start is not None
        waiting = await cluster.answered(4)
        await asyncio.sleep(3)
        assert await states(store, waiting) == {TurnState.READY}
        resume(cluster.config_file)
        await cluster.until(lambda: cluster.versions[-1] == 6)


def write_spoiled(folder: Path) -> None:
    """The lab's model with weights that say nothing."""
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weights in model.parameters():
            weights += torch.randn(weights.shape, generator=generator)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
