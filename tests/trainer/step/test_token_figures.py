"""What a step reports about each token, against the model's logits, one turn at a time."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from records.training.step_results import TokenFigures
from records.types import ReadySample
from tests.trainer.step.test_update import make, mixed_batch
from tests.trainer.tiny import conversation
from trainer.model.policy import Policy
from trainer.step.report import UpdateReport, trained_results


@torch.no_grad()
def by_hand(policy: Policy, one: ReadySample) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs of the answer at its temperature, and entropies at temperature 1, both [R]."""
    ids = torch.from_numpy(np.concatenate([one.prompt_ids, one.response_ids])).long()
    logits = policy.model(input_ids=ids[None]).logits[0].double()
    at = logits[len(one.prompt_ids) - 1 : -1]
    chosen = torch.from_numpy(one.response_ids).long()[:, None]
    logprobs = torch.log_softmax(at / one.temperature, dim=-1).gather(1, chosen)[:, 0]
    whole = torch.log_softmax(at, dim=-1)
    return logprobs.numpy(), -(whole.exp() * whole).sum(dim=-1).numpy()


def figures_of(report: UpdateReport) -> list[TokenFigures]:
    found = [one for one in report.figures if one is not None]
    assert len(found) == len(report.figures)
    return found


@pytest.mark.parametrize("micro_batch_tokens", [8192, 40])
def test_figures_are_those_of_the_model_and_the_engine(folder, micro_batch_tokens):
    updater = make(folder, micro_batch_tokens=micro_batch_tokens)
    samples = mixed_batch(4)
    wanted = [by_hand(updater.policy, one) for one in samples]
    report = updater.update(samples, 0)
    for one, found, (logprobs, entropies) in zip(samples, figures_of(report), wanted, strict=True):
        np.testing.assert_allclose(found.log_ratios, 0.0, atol=1e-6)
        np.testing.assert_allclose(found.entropies, entropies, atol=1e-4)
        gaps = logprobs - one.rollout_logprobs
        np.testing.assert_allclose(found.engine_gaps, np.abs(gaps), atol=1e-4)
        # The default: the ratio of each token, at most 2.
        np.testing.assert_allclose(found.weights, np.minimum(np.exp(gaps), 2.0), rtol=1e-3)
    used = np.concatenate([one[np.isfinite(one)] for one in report.advantages])
    for share in (5, 25, 50, 75, 95):
        assert report.metrics[f"opd/adv_q{share:02d}"] == pytest.approx(
            float(np.quantile(used, share / 100)), abs=1e-5
        )


def test_of_several_passes_the_last_one_is_reported(folder):
    samples = mixed_batch(4)
    once, twice = (
        make(folder, learning_rate=1e-3),
        make(folder, learning_rate=1e-3, epochs_per_batch=2),
    )
    before = [by_hand(once.policy, one) for one in samples]
    once.update(samples, 0)
    after = [by_hand(once.policy, one) for one in samples]
    report = twice.update(samples, 0)
    ratios = []
    for one, found, old, new in zip(samples, figures_of(report), before, after, strict=True):
        np.testing.assert_allclose(found.log_ratios, new[0] - old[0], atol=1e-4)
        np.testing.assert_allclose(found.entropies, new[1], atol=1e-4)
        # Rollout correction compares the policy before the step with the engine.
        gaps = np.abs(old[0] - one.rollout_logprobs)
        np.testing.assert_allclose(found.engine_gaps, gaps, atol=1e-4)
        ratios.append(np.exp(found.log_ratios))
    largest = float(np.concatenate(ratios).max())
    assert largest > 1.001
    assert report.metrics["ratio_max"] == pytest.approx(largest, rel=1e-5)


def test_a_rejected_token_keeps_its_figures_but_has_no_weight(folder):
    rule = {"statistic": "token_k1", "lower": 0.5, "upper": 2.0}
    updater = make(folder, correction={"rejections": [rule]})
    samples = mixed_batch(4)
    wanted = [by_hand(updater.policy, one) for one in samples]
    report = updater.update(samples, 0)
    results = trained_results(samples, [0] * len(samples), report)
    assert results
    rejected = 0
    for one, found, advantages, (logprobs, _) in zip(
        samples, figures_of(report), report.advantages, wanted, strict=True
    ):
        out = np.isnan(advantages)
        ratios = np.exp(logprobs - one.rollout_logprobs)
        np.testing.assert_array_equal(out, (ratios < 0.5) | (ratios > 2.0))
        np.testing.assert_array_equal(np.isnan(found.weights), out)
        np.testing.assert_allclose(found.weights[~out], ratios[~out], rtol=1e-3)
        assert np.isfinite(found.engine_gaps).all()
        assert np.isfinite(found.entropies).all()
        rejected += int(out.sum())
    assert 0 < rejected < sum(len(one.response_ids) for one in samples)
    by_turn = dict(zip((one.turn_id for one in samples), report.figures, strict=True))
    assert all(one.figures is by_turn[one.turn_id] for one in results)


def test_what_cannot_be_compared_with_the_engine_is_not_known(folder):
    [plain], [other] = conversation("a", [(5, 4)], seed=1), conversation("b", [(6, 4)], seed=2)
    greedy = dataclasses.replace(other, temperature=0.0, distribution_modified="temperature_0")
    first, second = figures_of(make(folder).update([plain, greedy], 0))
    assert np.isfinite(first.engine_gaps).all()
    assert np.isnan(second.engine_gaps).all()
    assert second.weights.tolist() == [1.0] * 4
    assert np.isfinite(second.entropies).all()
