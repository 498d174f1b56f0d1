"""The lab's model in the embedded engine's own process, the proxy in front of it, and a tap between
them that keeps what was really asked and answered.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from api_proxy.app import ProxyDeps
from api_proxy.config import ProxyConfig
from records.store import Store
from rollout_bridge.config import RendererConfig
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.rendering.rendering import Rendering
from tests.clients.serving import serving
from tests.integration.engine_tap import EngineTap
from tests.records.new_store import new_store

ROOT = Path(__file__).parents[3]
MODEL = str(ROOT / "examples" / "tool_lab" / "model")


@dataclass
class Lab:
    """A running proxy and what stands behind it; `url` is without a path."""

    url: str
    store: Store
    tap: EngineTap
    rendering: Rendering


@pytest.fixture(scope="session")
def engine_url() -> Iterator[str]:
    command = [sys.executable, "-m", "rollout_bridge.embedded", "--model", MODEL]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        port = json.loads(process.stdout.readline())["port"]
        yield f"http://127.0.0.1:{port}"
        process.terminate()


@pytest.fixture(scope="session")
def lab_rendering() -> Rendering:
    return Rendering.load(MODEL, RendererConfig(name="qwen3", enable_thinking=False))


@pytest.fixture
async def lab(engine_url: str, lab_rendering: Rendering, tmp_path: Path) -> AsyncIterator[Lab]:
    # Greedy, so that a conversation is the same each time, and yet a turn that may train.
    config = ProxyConfig(max_output_tokens=96, train_modified="keep")
    database = new_store(tmp_path / "records.db")
    async with (
        await Store.open(database) as store,
        EngineTap(engine_url) as tap,
        EngineClient(tap.url, vocab_size=lab_rendering.vocab_size) as engine,
    ):
        deps = ProxyDeps(store=store, engine=engine, rendering=lab_rendering, config=config)
        async with serving(deps, database) as url:
            yield Lab(url, store, tap, lab_rendering)
