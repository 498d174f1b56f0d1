"""Sampling for an evaluation: what must stop it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from opd.evaluation.attempts import (
    CONCURRENCY,
    ServedPolicy,
    count_passes,
    gather_counted,
    sample_on,
)
from opd.evaluation.figures.dynamic_n import StoppingRule
from opd.evaluation.tasks import Answer, PromptTask, Task, TaskSuite
from rollout_bridge.config import RendererConfig
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.errors import EngineProtocolError
from rollout_bridge.rendering.rendering import Rendering
from tests.examples.shipped import MODEL


def policy(engine: EngineClient, label: str) -> ServedPolicy:
    rendering = Rendering.load(str(MODEL), RendererConfig(name="qwen3", enable_thinking=False))
    return ServedPolicy(engine=engine, rendering=rendering, label=label, temperature=1.0)


def suite(task: Task) -> TaskSuite:
    return TaskSuite(name="one", tasks=[task], headline=["said"], max_new_tokens=4)


def nothing(done: int, total: int) -> None:
    assert done <= total


async def test_an_engine_that_serves_another_version_ends_the_evaluation(lab_engine: str) -> None:
    task = PromptTask(
        task_id="hello",
        messages=[{"role": "user", "content": "Hello"}],
        checks={"said": lambda message: bool(message["content"])},
    )
    async with EngineClient(lab_engine) as engine:
        counts = await count_passes(
            policy(engine, "0"), suite(task), samples=2, seed=0, progress=nothing
        )
        assert counts == {"said": {"hello": (2, 2)}}
        with pytest.raises(EngineProtocolError, match="serves version '0' and not '7'"):
            await count_passes(
                policy(engine, "7"), suite(task), samples=2, seed=0, progress=nothing
            )


@dataclass
class Fickle:
    """A task that reports another metric each time."""

    task_id: str = "fickle"
    tries: list[int] = field(default_factory=list)

    async def attempt(self, answer: Answer) -> Mapping[str, bool]:
        self.tries.append(len(self.tries))
        return {f"metric-{len(self.tries)}": True}


async def test_a_task_with_changing_metrics_is_refused() -> None:
    async with EngineClient("http://127.0.0.1:1") as engine:
        with pytest.raises(ValueError, match="fickle: its tries report different metrics"):
            await count_passes(
                policy(engine, "0"), suite(Fickle()), samples=2, seed=0, progress=nothing
            )


@dataclass
class PassesFrom:
    """A task whose tries pass from the one of this number on."""

    task_id: str
    first: int
    metric: str = "said"
    tries: int = 0

    async def attempt(self, answer: Answer) -> Mapping[str, bool]:
        self.tries += 1
        return {self.metric: self.tries >= self.first}


async def test_hard_tasks_are_tried_on_until_they_pass_or_the_cap() -> None:
    tasks = [PassesFrom("easy", 2), PassesFrom("hard", 5), PassesFrom("never", 99)]
    beside = PassesFrom("beside", 99, metric="other")
    one = TaskSuite(name="one", tasks=[*tasks, beside], headline=["said"], max_new_tokens=4)
    shown: list[tuple[int, int]] = []
    async with EngineClient("http://127.0.0.1:1") as engine:
        sampler = policy(engine, "0")
        counts = await count_passes(sampler, one, samples=2, seed=0, progress=nothing)
        assert counts["said"] == {"easy": (1, 2), "hard": (0, 2), "never": (0, 2)}
        further = await sample_on(
            sampler,
            one,
            counts,
            StoppingRule(successes=1, max_tries=7),
            seed=0,
            progress=lambda done, total: shown.append((done, total)),
        )
    # Two tries a round; the one that was left to the cap is made alone.
    assert further == {"said": {"easy": (1, 2), "hard": (2, 6), "never": (0, 7)}}
    assert counts["said"]["hard"] == (0, 2)
    assert beside.tries == 2
    assert [done for done, _ in shown] == list(range(1, 10))
    assert all(done <= total for done, total in shown)
    assert shown[-1] == (9, 9)


async def test_the_first_error_ends_all_work_that_is_left() -> None:
    started: list[int] = []

    async def work(number: int) -> int:
        started.append(number)
        await asyncio.sleep(0 if number == 0 else 60)
        if number == 0:
            raise RuntimeError("first")
        return number

    with pytest.raises(RuntimeError, match="first"):
        await gather_counted([work(number) for number in range(CONCURRENCY + 50)], nothing)
    assert len(started) <= CONCURRENCY + 1


async def test_results_keep_their_order_and_progress_counts_them() -> None:
    seen: list[tuple[int, int]] = []

    async def work(number: int) -> int:
        await asyncio.sleep(0.01 * (3 - number))
        return number

    found = await gather_counted(
        [work(number) for number in range(3)], lambda done, total: seen.append((done, total))
    )
    assert found == [0, 1, 2]
    assert seen == [(1, 3), (2, 3), (3, 3)]
