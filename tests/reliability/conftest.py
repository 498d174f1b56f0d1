"""The tool lab's model in a real engine, shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rollout_bridge.config import RendererConfig
from rollout_bridge.rendering.rendering import Rendering
from tests.contract.engine_process import embedded_engine
from tests.reliability.lab import MODEL


@pytest.fixture(scope="session")
def engine_url() -> Iterator[str]:
    with embedded_engine(MODEL, "--seed", "0") as url:
        yield url


@pytest.fixture(scope="session")
def rendering() -> Rendering:
    return Rendering.load(str(MODEL), RendererConfig(name="qwen3", enable_thinking=False))
