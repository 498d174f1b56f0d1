"""What the policy's engines make of fixed texts when a job starts: their part of the calibration.

The texts travel with the job's first batch as rows without turns, so that slime's own forward pass
before the step scores them; the advantage hook compares (ALGORITHMS 1.10). It knows no slime.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from records.types import Ids, Logprobs
from rollout_bridge.config import RendererConfig
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.config import EngineClientConfig
from rollout_bridge.rendering.calibration_texts import calibration_sequences
from rollout_bridge.rendering.rendering import Rendering
from rollout_bridge.together import all_or_none


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """ids [T] and the engine's log-probs [T - 1] of ids[1:], at temperature 1; `bound` is that of
    the whole calibration, for the mean |engine - trainer| in nats.
    """

    ids: Ids
    logprobs: Logprobs
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePlan:
    """How a job is calibrated; for `bound` see `Probe`. Ids are below `vocab_size`, the rows of the
    model's head (None: not known).
    """

    model: str
    vocab_size: int | None
    renderer: RendererConfig
    client: EngineClientConfig
    seed: int
    bound: float


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
