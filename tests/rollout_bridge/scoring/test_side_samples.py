"""Side samples in the scoring stage: the lab's engine draws and scores them; the policy's faults
come from clients that change one of its answers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest

from records.names import DropReason, SideSource, TurnState
from records.store import Store
from records.turns.recording import Recording, RecordingKind
from records.types import ReadySample
from rollout_bridge.config import RendererConfig
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.errors import EngineLogprobError, EngineUnavailable
from rollout_bridge.rendering.rendering import Rendering
from rollout_bridge.scoring.policy_scores import PolicyScorer
from rollout_bridge.scoring.scoring import ScoringWorker
from rollout_bridge.scoring.side_samples import SideSampler
from tests.examples.shipped import MODEL
from tests.rollout_bridge.fault_teacher import (
    HINT,
    config,
    run_until_left_scoring,
    scoring_turn,
)
from trainer.model.model_config import model_vocab_size

VOCAB = model_vocab_size(str(MODEL))
HINTS = (HINT, "Use Celsius, please.")


@pytest.fixture(scope="module")
def rendering() -> Rendering:
    return Rendering.load(str(MODEL), RendererConfig(name="qwen3", enable_thinking=False))


@pytest.fixture
async def frozen(lab_engine: str) -> AsyncIterator[EngineClient]:
    async with EngineClient(lab_engine, vocab_size=VOCAB) as client:
        yield client


class Policy(EngineClient):
    """The lab's engine; `versions` are what it then says of its weights."""

    def __init__(self, url: str) -> None:
        super().__init__(url, vocab_size=VOCAB)
        self.versions: list[str] = []
        self.aborts = 0
        self.ignores_bias = False
        self.failure: Exception | None = None
        self.draws = 0

    async def model_info(self):
        info = await super().model_info()
        return replace(info, weight_version=self.versions.pop(0)) if self.versions else info

    async def score_with_topk(self, input_ids, start, k, *, routing_key=None):
        self.draws += 1
        if self.failure is not None:
            raise self.failure
        return await super().score_with_topk(input_ids, start, k, routing_key=routing_key)

    async def draw(self, input_ids, params, number, **options):
        if self.ignores_bias:
            params = replace(params, temperature=0.0, logit_bias=())
        found = await super().draw(input_ids, params, number, **options)
        if self.aborts:
            self.aborts -= 1
            found[-1] = replace(
                found[-1],
                finish_reason="abort",
                output_ids=found[-1].output_ids[:0],
                output_logprobs=found[-1].output_logprobs[:0],
                weight_spans=None,
            )
        return found


@pytest.fixture
async def policy(lab_engine: str) -> AsyncIterator[Policy]:
    client = Policy(lab_engine)
    async with client:
        yield client


def worker_of(
    store: Store,
    frozen: EngineClient,
    policy: Policy,
    rendering: Rendering,
    source: SideSource = SideSource.POLICY,
    size: int = 12,
    **options,
) -> ScoringWorker:
    return ScoringWorker(
        store,
        frozen,
        rendering,
        config(**options),
        "scoring-1",
        policy=PolicyScorer(policy),
        side_sampler=SideSampler(policy, source, size, vocab_size=VOCAB),
    )


async def the_sample(store: Store) -> ReadySample:
    (sample,) = await store.lease(owner="trainer", count=1, ttl_s=60)
    return sample


@pytest.mark.parametrize("source", [SideSource.POLICY, SideSource.POLICY_TOP])
async def test_they_are_stored_with_the_scores(store, frozen, policy, rendering, source):
    await scoring_turn(store, rendering, hints=HINTS)
    worker = worker_of(store, frozen, policy, rendering, source)
    await run_until_left_scoring(store, worker)
    sample = await the_sample(store)
    side = sample.side_samples
    assert side is not None
    assert (side.source, side.policy_version) == (source, 0)
    assert side.ids.shape == (len(sample.response_ids), 12)
    prompts = (sample.prompt_ids, sample.teachings[0].hinted_prompt_ids)
    for prompt, found in zip(prompts, (side.rollout_logprobs, side.teacher_logprobs), strict=True):
        ids = np.concatenate([prompt, sample.response_ids])
        expected = await frozen.score_tokens(ids, len(prompt), side.ids)
        np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.abs(side.rollout_logprobs - side.teacher_logprobs).max() > 1e-2
    requests = worker.metrics.registry.get_sample_value("policy_side_requests_total")
    assert requests is not None
    assert requests == 1 if source is SideSource.POLICY_TOP else requests >= 1


async def test_weights_that_change_meanwhile_draw_again(store, frozen, policy, rendering):
    await scoring_turn(store, rendering)
    policy.versions = ["3", "4", "4"]
    await run_until_left_scoring(store, worker_of(store, frozen, policy, rendering))
    side = (await the_sample(store)).side_samples
    assert side is not None
    assert (side.policy_version, policy.draws) == (4, 2)


async def test_weights_that_change_all_the_time_let_the_turn_wait(store, frozen, policy, rendering):
    await scoring_turn(store, rendering)
    policy.versions = ["1", "2", "3", "4"]
    await run_until_left_scoring(store, worker_of(store, frozen, policy, rendering))
    side = (await the_sample(store)).side_samples
    assert side is not None
    assert (side.policy_version, policy.draws) == (0, 4)


async def test_a_draw_that_is_aborted_is_made_later(store, frozen, policy, rendering, monkeypatch):
    monkeypatch.setattr("rollout_bridge.scoring.side_samples._HEAD", 1)
    await scoring_turn(store, rendering)
    policy.aborts = 1
    await run_until_left_scoring(store, worker_of(store, frozen, policy, rendering, size=200))
    assert (await the_sample(store)).side_samples is not None
    assert (policy.aborts, policy.draws) == (0, 2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"failure": EngineLogprobError("a null")}, DropReason.ROLLOUT_LOGPROBS_INVALID),
        ({"failure": EngineUnavailable("down")}, DropReason.TEACHER_UNAVAILABLE),
        ({"failure": ValueError("id 9 is outside")}, DropReason.FOREIGN_TOKENS),
        ({"ignores_bias": True}, DropReason.ROLLOUT_LOGPROBS_INVALID),
    ],
)
async def test_what_the_policy_cannot_draw_has_a_reason(
    store, frozen, policy, rendering, monkeypatch, change, reason
):
    monkeypatch.setattr("rollout_bridge.scoring.side_samples._HEAD", 1)
    turn_id = await scoring_turn(store, rendering)
    for name, value in change.items():
        setattr(policy, name, value)
    worker = worker_of(store, frozen, policy, rendering, size=200, loop_give_up_after_s=0.2)
    await run_until_left_scoring(store, worker)
    assert await store.drops() == {reason: 1}
    assert await store.score_of(turn_id) is None
    label = {"reason": reason.value}
    assert worker.metrics.registry.get_sample_value("teacher_dropped_total", label) == 1


async def test_a_teacher_that_cannot_score_them_has_a_reason(
    store, client, teacher, policy, rendering
):
    """It answers nothing about tokens that it is given."""
    await scoring_turn(store, rendering)
    await run_until_left_scoring(store, worker_of(store, client, policy, rendering))
    assert await store.drops() == {DropReason.TEACHER_MISALIGNED: 1}
    assert (await store.counts())[TurnState.READY] == 0


async def test_turns_that_never_train_have_none(store, frozen, policy, rendering):
    recording = Recording(
        kind=RecordingKind.RECORDED_WITH_LOGPROBS, source="x", position=0, held_out=True
    )
    turn_id = await scoring_turn(store, rendering, recording=recording)
    await run_until_left_scoring(store, worker_of(store, frozen, policy, rendering))
    assert await store.drops() == {DropReason.HELD_OUT: 1}
    assert await store.score_of(turn_id) is not None
    assert policy.draws == 0


async def test_recorded_turns_have_them_as_well(store, frozen, policy, rendering):
    recording = Recording(kind=RecordingKind.RECORDED, source="x", position=0)
    await scoring_turn(store, rendering, recording=recording)
    await run_until_left_scoring(store, worker_of(store, frozen, policy, rendering))
    assert (await the_sample(store)).side_samples is not None
    assert policy.draws == 1
