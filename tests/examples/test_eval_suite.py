"""The lab's suite for `opd eval` and the lab's own measuring say the same of the same answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from examples.tool_lab.eval_suite import suite, suits
from examples.tool_lab.measure import EXAMPLES, example_answers, measure_policy
from examples.tool_lab.preferences import TRAINED_KINDS
from opd.evaluation.attempts import ServedPolicy, count_passes
from opd.evaluation.tasks import SuiteRequest
from rollout_bridge.config import RendererConfig
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.types import Generation, SamplingParams
from rollout_bridge.rendering.rendering import Rendering
from tests.examples.shipped import MODEL

TASKS, SEED = 4, 3


class OneAnswerEach(EngineClient):
    """The real engine, which answers each prompt once: both measurements get the same answers."""

    def __init__(self, base_url: str):
        super().__init__(base_url)
        self.given: dict[bytes, Generation] = {}

    async def generate(self, input_ids: Any, params: SamplingParams, **options: Any) -> Generation:
        prompt = bytes(input_ids.tobytes())
        if prompt not in self.given:
            self.given[prompt] = await super().generate(input_ids, params, **options)
        return self.given[prompt]


@pytest.fixture
async def engine(lab_engine: str) -> AsyncIterator[OneAnswerEach]:
    async with OneAnswerEach(lab_engine) as client:
        yield client


def nothing(done: int, total: int) -> None:
    assert done <= total


async def test_pass_at_1_is_the_rate_that_the_lab_measures(
    engine: OneAnswerEach, tmp_path: Path
) -> None:
    rendering = Rendering.load(str(MODEL), RendererConfig(name="qwen3", enable_thinking=False))
    lab = suite(SuiteRequest(folder=tmp_path, model=str(MODEL), tasks=TASKS, seed=SEED))
    policy = ServedPolicy(engine=engine, rendering=rendering, label="0", temperature=1.0)
    counts = await count_passes(policy, lab, samples=1, seed=0, progress=nothing)
    asked = len(engine.given)
    rates = await measure_policy(
        engine, rendering, samples=TASKS, seed=SEED, kinds=TRAINED_KINDS, progress=nothing
    )
    assert len(engine.given) == asked, "both ask the same questions"
    assert {
        metric: (sum(c for c, _ in found.values()), len(found)) for metric, found in counts.items()
    } == {metric: (rate.hits, rate.count) for metric, rate in rates.items()}
    assert sum(rate.hits for rate in rates.values()) > 0
    assert {f"success_{kind}" for kind in TRAINED_KINDS} == set(lab.headline) <= set(rates)


async def test_answers_for_the_report_are_to_the_same_questions(engine: OneAnswerEach) -> None:
    rendering = Rendering.load(str(MODEL), RendererConfig(name="qwen3", enable_thinking=False))
    before, after = [
        await example_answers(engine, rendering, seed=SEED, kinds=TRAINED_KINDS) for _ in range(2)
    ]
    assert [one.asked for one in before] == [one.asked for one in after]
    assert [one.kind for one in before] == [kind for kind in TRAINED_KINDS for _ in range(EXAMPLES)]
    assert all(one.answer.startswith("[assistant] ") for one in before)


def test_the_suite_asks_for_what_the_runs_users_want(tmp_path: Path) -> None:
    assert not suits(tmp_path, "some/model")
    assert suits(tmp_path, str(MODEL))
    (tmp_path / "lab.toml").write_text('preferences = ["title"]\n')
    assert suits(tmp_path, "some/model")
    lab = suite(SuiteRequest(folder=tmp_path, model="some/model", tasks=2, seed=0))
    assert lab.headline == ["success_title"]
    assert len(lab.tasks) == 2 * 5
