"""Scoring's surroundings: a teacher that brings faults, the real client, renderer and store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from records.store import Store
from rollout_bridge.config import RendererConfig
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.config import EngineClientConfig
from rollout_bridge.rendering.rendering import Rendering
from tests.records.new_store import new_store
from tests.rollout_bridge.chat_tokenizers import write_tokenizer
from tests.rollout_bridge.fault_teacher import FaultTeacher, served


@pytest.fixture
async def teacher() -> AsyncIterator[FaultTeacher]:
    async with served() as fault_teacher:
        yield fault_teacher


@pytest.fixture
async def client(teacher: FaultTeacher) -> AsyncIterator[EngineClient]:
    config = EngineClientConfig(attempts=1, score_timeout_s=5.0)
    async with EngineClient(teacher.base_url, config=config) as opened:
        yield opened


@pytest.fixture(scope="module")
def rendering(tmp_path_factory: pytest.TempPathFactory) -> Rendering:
    folder = write_tokenizer(tmp_path_factory.mktemp("scoring"), "chat_template_thinking.jinja")
    return Rendering.load(folder, RendererConfig(name="qwen3"))


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with await Store.open(new_store(tmp_path / "records.db")) as opened:
        yield opened
