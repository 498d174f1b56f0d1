"""Where the foreign clients are installed, and the endpoints that they talk to.

`./run.sh clients` installs them and says so with OPD_CLIENTS; without it these tests are skipped,
since what they need takes minutes and gigabytes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from api_proxy.app import ProxyDeps
from api_proxy.config import ProxyConfig
from records.config import StoreConfig
from records.store import Store
from rollout_bridge.config import RendererConfig
from rollout_bridge.rendering.rendering import Rendering
from tests.api_proxy.scripted_engine import ScriptedEngine
from tests.clients.doors.conftest import ROOT, engine_url, lab, lab_rendering
from tests.clients.serving import serving
from tests.clients.suites.endpoint import LOGGERS, Endpoint
from tests.rollout_bridge.chat_tokenizers import write_tokenizer

__all__ = ["engine_url", "lab", "lab_rendering"]

HERE = Path(__file__).parent
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
collect_ignore = ["sglang_stubs", "agents", "langchain_standard"]
NODE = HERE.parent / "node"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is in this folder unless `./run.sh clients` runs it."""
    if os.environ.get("OPD_CLIENTS") == "1":
        return
    skip = pytest.mark.skip(reason="foreign clients: ./run.sh clients installs and runs them")
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def scripted_rendering(tmp_path_factory: pytest.TempPathFactory) -> Rendering:
    path = write_tokenizer(tmp_path_factory.mktemp("tokenizer"), "chat_template_thinking.jinja")
    return Rendering.load(path, RendererConfig(name="qwen3", enable_thinking=False))


class Warnings(logging.Handler):
    """Keeps what is logged at the level of a warning or above."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


Serve: TypeAlias = Callable[[Callable[[Rendering], ScriptedEngine]], Any]
"""Serves the engine that is made for the rendering: an async context manager of its Endpoint."""


@pytest.fixture
def serve(scripted_rendering: Rendering, tmp_path: Path) -> Serve:
    """The proxy on a port, over a store in SQLite and a policy without a model."""

    @asynccontextmanager
    async def served(make: Callable[[Rendering], ScriptedEngine]) -> AsyncIterator[Endpoint]:
        engine = make(scripted_rendering)
        seen = Warnings()
        for name in LOGGERS:
            logging.getLogger(name).addHandler(seen)
        try:
            config = StoreConfig.sqlite(tmp_path / "records.db")
            async with await Store.open(config) as store:
                deps = ProxyDeps(
                    store=store, engine=engine, rendering=scripted_rendering, config=ProxyConfig()
                )
                async with serving(deps, config) as url:
                    yield Endpoint(url, store, engine, scripted_rendering, seen.records)
        finally:
            for name in LOGGERS:
                logging.getLogger(name).removeHandler(seen)

    return served


@pytest.fixture
async def endpoint(serve: Serve) -> AsyncIterator[Endpoint]:
    """An endpoint whose policy says what the test writes down."""
    # Agents' prompts are long, and more so with a tokenizer that knows few words.
    async with serve(lambda _rendering: ScriptedEngine(context_length=400_000)) as served:
        yield served
