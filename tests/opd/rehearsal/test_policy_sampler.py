"""Answers to recorded prompts: how many are under way at a time."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from api_proxy.config import ProxyConfig
from opd.rehearsal.policy_sampler import PolicySampler
from opd.rehearsal.seats import Seats
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


@pytest.mark.parametrize(("own", "spare"), [(1, 0), (3, 0), (1, 2)])
async def test_samplers_share_the_seats(lab_engine: str, own: int, spare: int) -> None:
    rendering = Rendering.load(str(MODEL), RendererConfig(name="qwen3", enable_thinking=False))
    prompt = rendering.prompt_ids([{"role": "user", "content": "Hello."}], [])
    answered: list[int] = []
    async with Counting(lab_engine) as engine, Counting(lab_engine) as beside:
        seats = Seats(own, spare)
        one, two = (
            PolicySampler(
                engine,
                rendering,
                temperature=1.0,
                max_new_tokens=4,
                context_length=None,
                pause_mode="retract",
                proxy=ProxyConfig(),
                spare=beside,
                seats=seats,
                on_answer=lambda: answered.append(1),
            )
            for _ in range(2)
        )
        ids = np.asarray(prompt, dtype=np.int32)
        await asyncio.gather(*(sampler.answer(ids, []) for sampler in (one, two) * 4))
        assert (engine.most, beside.most) == (own, spare)
    assert len(answered) == 8


async def test_own_seats_are_taken_first() -> None:
    seats = Seats(2, 1)
    async with seats.one() as first, seats.one() as second, seats.one() as third:
        assert (first, second, third) == ("own", "own", "spare")
    async with seats.one() as again:
        assert again == "own"
