"""Samples a suite's tasks from a served policy.

It asks the engine directly, not through the proxy: nothing measured may be recorded or learned
from. A sample's seed depends on the evaluation's seed, the task and the sample's number, not on the
version, so that two versions are tried with the same noise (on engines that honour seeds).
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from opd.evaluation.figures.dynamic_n import StoppingRule
from opd.evaluation.tasks import Answer, Task, TaskSuite
from records.messages import Message
from records.types import Ids
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.errors import EngineProtocolError, EngineUnavailable
from rollout_bridge.engine.types import Generation, SamplingParams
from rollout_bridge.rendering.rendering import Rendering
from rollout_bridge.together import all_or_none

T = TypeVar("T")

CONCURRENCY = 64
Progress = Callable[[int, int], None]
"""Called with (done, total) after each sample."""
SuiteCounts = Mapping[str, Mapping[str, tuple[int, int]]]
"""(c, n) by metric and task id: successes and tries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPolicy:
    """One version served by an engine: what is needed to sample from it."""

    engine: EngineClient
    rendering: Rendering
    label: str
    temperature: float

    async def sample(self, prompt_ids: Ids, params: SamplingParams) -> Generation:
        """One response. Raises EngineError, also if the engine serves another version or aborts."""
        wanted = replace(
            params,
            temperature=self.temperature,
            stop_token_ids=tuple(self.rendering.stop_token_ids),
        )
        generation = await self.engine.generate(prompt_ids, wanted)
        if generation.weight_version not in (None, self.label):
            raise EngineProtocolError(
                f"the engine serves version {generation.weight_version!r} and not {self.label!r}: "
                "it was restarted or updated during the measurement"
            )
        if generation.finish_reason == "abort":
            raise EngineUnavailable("the engine aborted a sample: is somebody else pausing it?")
        return generation

    def answer(self, seeds: Callable[[], int], max_new_tokens: int) -> Answer:
        """A function that samples assistant messages, each with the next of `seeds`."""

        async def sampled(
            messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()
        ) -> Message:
            prompt = self.rendering.prompt_ids(messages, tools)
            params = SamplingParams(max_new_tokens=max_new_tokens, seed=seeds())
            generation = await self.sample(prompt, params)
            return answer_message(self.rendering, generation, tools, prompt)

        return sampled


def answer_message(
    rendering: Rendering, generation: Generation, tools: Sequence[dict[str, Any]], prompt_ids: Ids
) -> Message:
    """A sampled reply as an assistant message in OpenAI's shape; malformed calls are left out."""
    reply = rendering.parse(generation.output_ids, tools, prompt_ids)
    message: Message = {"role": "assistant", "content": reply.content}
    calls = [
        {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments_json},
        }
        for call in reply.tool_calls
        if call.ok
    ]
    return {**message, "tool_calls": calls} if calls else message


def sample_seed(seed: int, task_id: str, sample: int, call: int = 0) -> int:
    """A seed [0, 2^63) for one answer, the same in every process."""
    text = f"{seed}/{task_id}/{sample}/{call}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


async def gather_counted(work: Sequence[Coroutine[Any, Any, T]], progress: Progress) -> list[T]:
    """The results of all coroutines in order, at most CONCURRENCY at a time; the first error ends
    all.
    """
    gate = asyncio.Semaphore(CONCURRENCY)
    done = 0

    async def one(coroutine: Coroutine[Any, Any, T]) -> T:
        nonlocal done
        async with gate:
            result = await coroutine
        done += 1
        progress(done, len(work))
        return result

    try:
        return await all_or_none([one(coroutine) for coroutine in work])
    finally:
        for coroutine in work:
            coroutine.close()  # those that never began


async def count_passes(
    policy: ServedPolicy, suite: TaskSuite, *, samples: int, seed: int, progress: Progress
) -> SuiteCounts:
    """`samples` tries of each task.

    Raises EngineError; ValueError if a task's tries report different metrics.
    """
    counts: dict[str, dict[str, tuple[int, int]]] = {}
    tries = await _try_all(
        policy, [(task, range(samples)) for task in suite.tasks], suite, seed, progress
    )
    for task, outcomes in zip(suite.tasks, tries, strict=True):
        for metric in outcomes[0]:
            passed = sum(one[metric] for one in outcomes)
            counts.setdefault(metric, {})[task.task_id] = (passed, samples)
    return counts


async def sample_on(
    policy: ServedPolicy,
    suite: TaskSuite,
    counts: SuiteCounts,
    rule: StoppingRule,
    *,
    seed: int,
    progress: Progress,
) -> SuiteCounts:
    """The headline metrics with further tries of their tasks, until `rule` ends each.

    A task continues as long as one of its headline metrics does; each round makes as many tries of
    it as it had at first. `progress` is told how many tries may be left at most. Raises like
    `count_passes`.
    """
    found = {metric: dict(counts[metric]) for metric in suite.headline}
    done = 0
    while rounds := [
        (task, range(made, made + more))
        for task in suite.tasks
        for made, more in [_further(task.task_id, found, counts, rule)]
        if more
    ]:
        left = sum(rule.max_tries - numbers.start for _, numbers in rounds)

        def told(made: int, _: int, done: int = done, left: int = left) -> None:
            progress(done + made, done + left)

        for (task, numbers), outcomes in zip(
            rounds, await _try_all(policy, rounds, suite, seed, told), strict=True
        ):
            for metric in found:
                if task.task_id in found[metric]:
                    c, n = found[metric][task.task_id]
                    passed = sum(one[metric] for one in outcomes)
                    found[metric][task.task_id] = (c + passed, n + len(numbers))
            done += len(numbers)
    return found


def _further(
    task_id: str, found: SuiteCounts, counts: SuiteCounts, rule: StoppingRule
) -> tuple[int, int]:
    """Tries that a task has had, and how many come next."""
    metrics = [metric for metric in found if task_id in found[metric]]
    if not metrics:
        return 0, 0
    least, made = min(found[metric][task_id] for metric in metrics)
    return made, rule.next_tries(least, made, batch=counts[metrics[0]][task_id][1])


async def _try_all(
    policy: ServedPolicy,
    work: Sequence[tuple[Task, range]],
    suite: TaskSuite,
    seed: int,
    progress: Progress,
) -> list[list[Mapping[str, bool]]]:
    """The outcomes of the samples with these numbers, by task."""

    async def attempt(task: Task, sample: int) -> Mapping[str, bool]:
        calls = itertools.count()
        answer = policy.answer(
            lambda: sample_seed(seed, task.task_id, sample, next(calls)), suite.max_new_tokens
        )
        return await task.attempt(answer)

    tries = [attempt(task, sample) for task, numbers in work for sample in numbers]
    outcomes = iter(await gather_counted(tries, progress))
    by_task = []
    for task, numbers in work:
        found = [next(outcomes) for _ in numbers]
        if any(one.keys() != found[0].keys() for one in found):
            raise ValueError(f"task {task.task_id}: its tries report different metrics")
        by_task.append(found)
    return by_task
