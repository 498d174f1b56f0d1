"""The lab's measurements on a served policy: the questions of `evaluate`, put to an engine.

They go to the engine and not through the proxy, because measured answers must not be recorded or
learned from.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from examples.tool_lab.cases import GenerationRequest, Message
from examples.tool_lab.evaluate import POLICY_TEMPERATURE, Rate, build_cases, evaluate
from judge.votes.prompts import message_text
from opd.evaluation.attempts import answer_message
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.types import SamplingParams
from rollout_bridge.rendering.rendering import Rendering

CONCURRENCY = 64
MAX_NEW_TOKENS = 64
EXAMPLES = 2
"""Questions about each preference whose answers the report shows."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One answer to a question about a preference, as text."""

    kind: str
    asked: str
    answer: str


async def example_answers(
    engine: EngineClient, rendering: Rendering, *, seed: int, kinds: Sequence[str]
) -> list[Answered]:
    """Answers to the first questions about each preference; equal seeds give equal questions."""
    asked = [
        (kind, case.request)
        for kind in kinds
        for case in build_cases("success", EXAMPLES, seed, [kind])
    ]
    said = await asyncio.gather(
        *(answer(engine, rendering, request, POLICY_TEMPERATURE) for _, request in asked)
    )
    return [
        Answered(kind=kind, asked=message_text(request.messages[-1]), answer=message_text(message))
        for (kind, request), message in zip(asked, said, strict=True)
    ]


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
