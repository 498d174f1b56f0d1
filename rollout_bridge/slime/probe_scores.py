"""Asks the policy's engines for the scores of the calibration's texts."""

from __future__ import annotations

import asyncio

from rollout_bridge.engine.client import EngineClient
from rollout_bridge.rendering.calibration_texts import calibration_sequences
from rollout_bridge.rendering.rendering import Rendering
from rollout_bridge.slime.probes import Probe, ProbePlan
from rollout_bridge.together import all_or_none


async def score_probes(plan: ProbePlan, url: str) -> list[Probe]:
    """The calibration's sequences, scored by the engines behind `url`.

    Raises ValueError for a renderer that does not load, and what the engine client raises.
    """
    rendering = await asyncio.to_thread(Rendering.load, plan.model, plan.renderer)
    sequences = calibration_sequences(rendering, plan.seed, plan.vocab_size)
    async with EngineClient(url, config=plan.client) as engine:
        scores = await all_or_none([engine.score(ids, 1) for ids in sequences])
    return [
        Probe(ids=ids, logprobs=logprobs, bound=plan.bound)
        for ids, logprobs in zip(sequences, scores, strict=True)
    ]
