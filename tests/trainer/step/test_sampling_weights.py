"""Engine and age corrected apart: what the weights that sampled a turn say of it."""

import dataclasses

import numpy as np
import pytest
import torch

from records.names import DropReason
from records.types import VersionSpan
from tests.trainer.step.test_loop import BATCH, opened, samples
from tests.trainer.tiny import make_ready
from trainer.batch.views import TurnView
from trainer.calibration.calibrate import own_logprobs
from trainer.config import LoraConfig, TrainerConfig
from trainer.objectives.policy.decoupled import composed_weights
from trainer.objectives.policy.ppo import ppo_clip

APART = {
    "objective": {"surrogate": "decoupled", "engine_cap": 1.5, "importance_cap": 3.0},
    "correction": {"importance_level": "none"},
    "keep_checkpoints": 8,
    "learning_rate": 1e-2,
}
LORA = LoraConfig(rank=2, alpha=4)


def views_of(trainer, batch, gap: int) -> list[TurnView]:
    return trainer.updater.preparation.prepare(batch, [gap] * len(batch)).views


def said(trainer, batch) -> list[np.ndarray]:
    """The log-probs of each response by the policy as it is."""
    own = own_logprobs(trainer.updater.policy, "cpu")
    return [
        own(np.concatenate([one.prompt_ids, one.response_ids]))[-len(one.response_ids) :]
        for one in batch
    ]


@pytest.mark.parametrize("lora", [None, LORA])
async def test_each_version_is_asked_about_its_own_turns(folder, tmp_path, lora):
    async with opened(tmp_path, folder, lora=lora, **APART) as (trainer, store, _):
        asked = samples(2, first=50)
        by_version = [said(trainer, asked)]
        for number in range(2):
            await make_ready(store, samples(BATCH // 2, first=number * BATCH))
            assert await trainer.step() is not None
            by_version.append(said(trainer, asked))
        before = {n: p.detach().clone() for n, p in trainer.updater.policy.model.named_parameters()}
        for version in (0, 1):
            spans = (VersionSpan(version=version, start=0, end=len(asked[0].response_ids)),)
            batch = [
                dataclasses.replace(
                    one,
                    version_spans=(dataclasses.replace(spans[0], end=len(one.response_ids)),),
                )
                for one in asked
            ]
            for view, expected in zip(
                views_of(trainer, batch, 2 - version), by_version[version], strict=True
            ):
                np.testing.assert_allclose(view.sampling, expected, atol=2e-5)
                assert np.abs(view.sampling.numpy() - by_version[2][0][:1]).max() > 1e-4
        # Half a response by one version, half by another.
        one = asked[0]
        spans = (VersionSpan(version=0, start=0, end=1), VersionSpan(version=1, start=1, end=3))
        [view] = views_of(trainer, [dataclasses.replace(one, version_spans=spans)], 2)
        expected = np.concatenate([by_version[0][0][:1], by_version[1][0][1:]])
        np.testing.assert_allclose(view.sampling, expected, atol=2e-5)
        # Without a gap it is the policy before the step.
        for view, expected in zip(views_of(trainer, asked, 0), by_version[2], strict=True):
            np.testing.assert_allclose(view.sampling, expected, atol=2e-5)
        after = dict(trainer.updater.policy.model.named_parameters())
        assert all(torch.equal(before[name], after[name]) for name in before)


async def test_a_step_weighs_by_both(folder, tmp_path):
    async with opened(tmp_path, folder, **APART) as (trainer, store, _):
        await make_ready(store, samples(BATCH // 2))
        await trainer.step()
        stale = samples(BATCH // 2, first=BATCH)
        prepared = trainer.updater.preparation.prepare(stale, [1] * BATCH)
        total = trainer.updater.accumulate(prepared)
        expected = []
        for view, before in zip(prepared.views, prepared.before, strict=True):
            weights = composed_weights(
                view.rollout,
                view.sampling,
                before.logprobs_sampled,
                engine_cap=1.5,
                staleness_cap=3.0,
            )
            assert (weights - 1).abs().max() > 0.05
            terms = ppo_clip(
                before.logprobs_sampled,
                before.logprobs_sampled,
                view.teacher - before.logprobs,
                clip_low=0.2,
                clip_high=0.28,
                weights=weights,
            )
            expected.append(float(terms.loss.mean()))
        assert total.reduced["pg_loss"] == pytest.approx(np.mean(expected), abs=1e-5)


async def test_a_turn_whose_weights_are_gone_is_dropped(folder, tmp_path):
    async with opened(tmp_path, folder, **APART) as (trainer, store, _):
        await make_ready(store, samples(BATCH // 2, version=7))
        assert await trainer.step() is None
        assert await store.drops() == {DropReason.SAMPLING_WEIGHTS_GONE: BATCH}


def test_weights_that_would_not_be_kept_are_refused():
    with pytest.raises(ValueError, match="set keep_checkpoints to at least 5"):
        TrainerConfig(**{**APART, "keep_checkpoints": 4})
    with pytest.raises(ValueError, match="engine_cap has no meaning with surrogate ppo"):
        TrainerConfig(objective={"engine_cap": 2.0})
