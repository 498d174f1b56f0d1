"""`opd serve` with adapters: one engine is policy, judge and teacher, and learns a version."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import IO

import psutil
import pytest
from openai import AsyncOpenAI

from examples.tool_lab.run_lab import MODEL
from opd.processes.supervisor import free_ports
from opd.run import config as run_config
from records.config import StoreConfig
from records.store import Store
from tests.trainer.step.test_loop import samples
from tests.trainer.tiny import make_ready

ROOT = Path(__file__).parents[2]
SETTINGS = (
    "rehearsal.enabled=false",
    "trainer.objective.name=hindsight_opd",
    "trainer.rollout_batch_size=4",
    "trainer.epochs_per_batch=1",
    "trainer.engine_check_interval_s=0.5",
    "scoring.top_k=0",
    "judge.max_tokens=16",
)


async def started(port: int, folder: Path, said: IO[str]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "opd.cli.app", "serve", "--model", str(MODEL)],
        *["--run", str(folder), "--port", str(port)],
        *[word for setting in SETTINGS for word in ("--set", setting)],
        cwd=ROOT,
        stdout=said,
        stderr=asyncio.subprocess.STDOUT,
    )


async def until(is_so, seconds: float = 120) -> None:
    async with asyncio.timeout(seconds):
        while not is_so():
            await asyncio.sleep(0.1)


def served(folder: Path) -> int | None:
    file = folder / "served.json"
    return json.loads(file.read_text())["version"] if file.exists() else None


async def version_of_a_reply(client: AsyncOpenAI, store: Store, said: str) -> list[int]:
    reply = await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": said}], max_tokens=8
    )
    (turn,) = await store.turns([reply.id.removeprefix("chatcmpl-")])
    return [span.version for span in turn.version_spans]


@pytest.mark.long
async def test_a_version_is_learned_served_and_survives_its_engine(tmp_path: Path) -> None:
    port = free_ports(1)[0]
    store_config = StoreConfig.sqlite(tmp_path / "records.db")
    # Before there is a judge that would claim them.
    async with await Store.open(store_config) as store:
        await make_ready(store, samples(2))
    with (tmp_path / "said").open("w") as said:
        process = await started(port, tmp_path, said)
    address = f"http://127.0.0.1:{port}/v1"
    try:
        await until(lambda: served(tmp_path) == 1)
        config = run_config.load(tmp_path / "config.toml")
        assert config.frozen.shared
        assert config.frozen.base_url == config.policy.base_url
        engines = [
            one
            for one in psutil.Process(process.pid).children(recursive=True)
            if "engine" in one.cmdline()
        ]
        assert len(engines) == 1
        async with (
            await Store.open(store_config) as store,
            AsyncOpenAI(base_url=address, api_key="any", max_retries=0) as client,
        ):
            assert await version_of_a_reply(client, store, "Hello again") == [1]
            engines[0].kill()
            assert await version_of_a_reply(client, store, "Still there?") == [1]
        written = sorted(one.name for one in (tmp_path / "checkpoints/step_000001").iterdir())
        assert "adapter_model.safetensors" in written
        assert "model.safetensors" not in written
        assert not (tmp_path / "merged").exists()
    finally:
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 60) == 0
    assert "adapters are published as they are" in (tmp_path / "logs" / "trainer.log").read_text()
