"""Answers to recorded prompts: how many are under way at a time."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from api_proxy.config import ProxyConfig
from opd.rehearsal.policy_sampler import PolicySampler
from rollout_bridge.config import RendererConfig
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.rendering.rendering import Rendering
from tests.examples.shipped import MODEL


class Counting(EngineClient):
    """Knows how many answers are under way at a time."""

    under_way = most = 0

    async def generate(self, *args, **options):
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            return await super().generate(*args, **options)
        finally:
            self.under_way -= 1


@pytest.mark.parametrize("places", [1, 3])
async def test_samplers_share_their_places_of_the_engine(lab_engine: str, places: int) -> None:
    rendering = Rendering.load(str(MODEL), RendererConfig(name="qwen3", enable_thinking=False))
    prompt = rendering.prompt_ids([{"role": "user", "content": "Hello."}], [])
    answered: list[int] = []
    async with Counting(lab_engine) as engine:
        shared = asyncio.Semaphore(places)
        one, two = (
            PolicySampler(
                engine,
                rendering,
                temperature=1.0,
                max_new_tokens=4,
                context_length=None,
                pause_mode="retract",
                proxy=ProxyConfig(),
                places=shared,
                on_answer=lambda: answered.append(1),
            )
            for _ in range(2)
        )
        ids = np.asarray(prompt, dtype=np.int32)
        await asyncio.gather(*(sampler.answer(ids, []) for sampler in (one, two) * 4))
        assert engine.most == places
    assert len(answered) == 8
