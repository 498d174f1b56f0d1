"""The lab's measurements on a served policy: the questions of `evaluate`, put to an engine.

They go to the engine and not through the proxy, because measured answers must not be recorded or
learned from.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence

from examples.tool_lab.cases import GenerationRequest, Message
from examples.tool_lab.evaluate import Rate, evaluate
from opd.evaluation.attempts import answer_message
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.types import SamplingParams
from rollout_bridge.rendering.rendering import Rendering

CONCURRENCY = 64
MAX_NEW_TOKENS = 64
GROUPS = ("success", "other_skills", "contrary")


async def measure_policy(
    engine: EngineClient,
    rendering: Rendering,
    *,
    samples: int,
    seed: int,
    kinds: Sequence[str],
    progress: Callable[[int, int], None],
) -> dict[str, Rate]:
    """Rates of every metric, `samples` answers each; `progress(done, total)` after each answer."""

    async def generate(requests: list[GenerationRequest], temperature: float) -> list[Message]:
        gate = asyncio.Semaphore(CONCURRENCY)
        done = 0

        async def one(request: GenerationRequest) -> Message:
            nonlocal done
            async with gate:
                message = await answer(engine, rendering, request, temperature)
            done += 1
            progress(done, len(requests))
            return message

        return list(await asyncio.gather(*(one(request) for request in requests)))

    return await evaluate(generate, samples, seed, GROUPS, kinds)


async def answer(
    engine: EngineClient, rendering: Rendering, request: GenerationRequest, temperature: float
) -> Message:
    """One sampled reply as an assistant message."""
    prompt = rendering.prompt_ids(request.messages, request.tools)
    params = SamplingParams(
        temperature=temperature,
        max_new_tokens=MAX_NEW_TOKENS,
        stop_token_ids=tuple(rendering.stop_token_ids),
    )
    generation = await engine.generate(prompt, params)
    return answer_message(rendering, generation, request.tools, prompt)


def as_numbers(rates: dict[str, Rate]) -> dict[str, float]:
    """The rates alone, for the summary."""
    return {name: round(rate.value, 4) for name, rate in rates.items()}


def dumps(rates: dict[str, Rate]) -> str:
    """Rates with their counts, as JSON."""
    return json.dumps({name: [rate.hits, rate.count] for name, rate in rates.items()})
