"""Every objective through the whole update: teachers in the trainer, merged turns, epochs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from records.types import ReadySample, Teaching
from rollout_bridge.merging import separate_turns
from tests.trainer.test_update import largest_difference, mixed_batch, weights
from tests.trainer.tiny import load, random_ids, save_model
from trainer.config import TrainerConfig
from trainer.teacher_models import EmaTeacher
from trainer.update import Updater

FROZEN = {"teacher": {"kind": "frozen"}}
CONFIGS: dict[str, dict] = {
    "hindsight_opd": {},
    "current_reference": {"objective": {"advantage_reference": "current"}},
    "normalised": {"objective": {"normalise": True}},
    "with_rewards": {"objective": {"reward_coef": 0.5}},
    "rewards_by_step": {"objective": {"reward_coef": 1.0, "reward_baseline": "step"}},
    "replaced": {
        "objective": {
            "reward_coef": 1.0,
            "mix": "replace",
            "pass_rate_threshold": 0.5,
            "horizon": 2,
        }
    },
    "cispo": {"objective": {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 4.0}},
    "gspo": {"objective": {"surrogate": "gspo"}},
    "pure_is": {"objective": {"surrogate": "pure_is"}, "correction": {"mode": "pure_is"}},
    "unclipped_async": {
        "objective": {"surrogate": "unclipped", "advantage_reference": "current"},
        "correction": {"mode": "bypass"},
    },
    "decoupled": {
        "objective": {"surrogate": "decoupled"},
        "correction": {"importance_level": "none"},
    },
    "a3po": {"objective": {"surrogate": "a3po"}, "correction": {"importance_level": "none"}},
    "m2po": {"objective": {"surrogate": "m2po"}, "correction": {"mode": "bypass"}},
    "supervised": {"objective": {"name": "supervised_opd"}},
    "forward_kl": {"objective": {"name": "forward_kl_topk", "topk": 8}, **FROZEN},
    "topk_tail": {"objective": {"name": "topk_tail_reverse_kl", "topk": 8}, **FROZEN},
    "self_distillation": {"objective": {"name": "self_distillation", "topk": 8}, **FROZEN},
    "overlap_topk": {"objective": {"name": "overlap_topk"}, **FROZEN},
    "hybrid": {"objective": {"name": "overlap_topk", "reward_coef": 0.5}, **FROZEN},
    "side_samples": {"objective": {"name": "side_samples", "samples": 8}, **FROZEN},
    "sparse_kl": {"objective": {"name": "sparse_kl", "topk": 8}, **FROZEN},
    "batch_normalised_weights": {"correction": {"batch_normalize": True}},
    "rejection": {"correction": {"rejections": [{"statistic": "token", "upper": 5.0}]}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return load(save_model(tmp_path_factory.mktemp("teacher"), seed=7)).freeze()


def make(folder, teacher, name: str, **options) -> Updater:
    values = {"learning_rate": 1e-3, "tensorboard": False, "beta_kl": 0.0} | CONFIGS[name] | options
    config = TrainerConfig.model_validate(values)
    own = teacher if config.teacher.in_trainer else None
    return Updater(load(folder), None, config, teacher=own)


def taught(seed: int) -> list[ReadySample]:
    generator = np.random.default_rng(seed)
    return [
        dataclasses.replace(
            one,
            rollout_logprobs=(one.teacher_logprobs - 0.5).astype(np.float32),
            reward=float(generator.choice([-1.0, 1.0])),
            teachings=tuple(
                Teaching(
                    candidate=candidate,
                    hint=f"hint {candidate}",
                    teacher="teacher",
                    teacher_version="0",
                    hinted_prompt_ids=np.concatenate([random_ids(generator, 3), one.prompt_ids]),
                    teacher_logprobs=one.teacher_logprobs,
                )
                for candidate in range(2)
            ),
        )
        for one in mixed_batch(seed)
    ]


def prepared(updater: Updater, samples: list[ReadySample]) -> list[ReadySample]:
    return updater.draw_side_samples(samples, 0) or samples


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_reports_what_it_promises_and_changes_the_policy(folder, teacher, name):
    updater = make(folder, teacher, name)
    before = weights(updater)
    report = updater.update(prepared(updater, taught(1)), 0, version_gaps=[1] * 7)
    assert report.skipped is None
    assert updater.expected_keys <= report.metrics.keys()
    assert any(np.isfinite(values).any() for values in report.advantages)
    assert largest_difference(before, weights(updater)) > 1e-4


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("epochs", [1, 2])
def test_merging_turns_and_splitting_batches_change_nothing(folder, teacher, name, epochs):
    options = {"adam_eps": 1e-2, "epochs_per_batch": epochs}
    merged = make(folder, teacher, name, **options)
    separate = make(folder, teacher, name, micro_batch_tokens=40, **options)
    samples = prepared(merged, taught(1))
    one = merged.update(samples, 0, version_gaps=[1] * 7)
    other = separate.update(samples, 0, version_gaps=[1] * 7, sequences=separate_turns(samples))
    assert one.metrics["grad_norm"] == pytest.approx(other.metrics["grad_norm"], rel=1e-4)
    assert one.metrics["loss"] == pytest.approx(other.metrics["loss"], rel=1e-4, abs=1e-6)
    for mine, theirs in zip(one.advantages, other.advantages, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    assert largest_difference(weights(merged), weights(separate)) < 1e-5


def test_terms_beside_a_policy_gradient_are_told_in_parts_of_it(folder, teacher):
    hybrid = make(folder, teacher, "hybrid").update(taught(1), 0).metrics
    expected = abs(hybrid["opd/kl_loss"] / (0.5 * hybrid["reward_pg_loss"]))
    assert hybrid["opd_to_pg_ratio"] == pytest.approx(expected)
    passed: dict[bytes, list[bool]] = {}
    for sample in taught(1):
        passed.setdefault(sample.prompt_ids.tobytes(), []).append(sample.reward == 1.0)
    seldom = [np.mean(outcomes) <= 0.5 for outcomes in passed.values()]
    assert 0 < sum(seldom) < len(seldom)
    replaced = make(folder, teacher, "replaced").update(taught(1), 0).metrics
    assert replaced["opd/frac_underperforming_prompts"] == pytest.approx(np.mean(seldom))


@pytest.mark.parametrize("kind", ["frozen", "current", "ema", "trust_region"])
def test_teachers_in_the_trainer(folder, kind):
    from trainer.teacher_models import TrustRegionTeacher

    config = TrainerConfig.model_validate(
        {
            "learning_rate": 1e-3,
            "beta_kl": 0.0,
            "tensorboard": False,
            "objective": {"name": "topk_tail_reverse_kl", "topk": 8},
            "teacher": {"kind": kind},
        }
    )
    policy, start = load(folder), load(folder).freeze()
    models = {
        "frozen": start,
        "current": policy,
        "ema": EmaTeacher(policy, 0.5),
        "trust_region": TrustRegionTeacher(start, policy, 0.3),
    }
    updater = Updater(policy, None, config, teacher=models[kind])
    first = updater.update(taught(1), 0)
    assert first.skipped is None
    for step in range(1, 4):
        last = updater.update(taught(1), step)
    assert last.metrics["opd/kl_loss"] < first.metrics["opd/kl_loss"]
    if kind == "ema":
        average, own = models["ema"].state()[0], policy.trainable_parameters()[0]
        assert 0 < float((average - own.detach()).abs().max()) < 1e-2


def test_vetoed_turns_leave_the_denominator(folder, teacher):
    updater = make(folder, teacher, "hindsight_opd", correction={"veto_threshold": 1e-3})
    samples = taught(1)
    far = samples[2].rollout_logprobs.copy()
    # No engine says this; it stands for a token that the policy would never have sampled.
    far[0] = 30.0
    vetoed = [*samples[:2], dataclasses.replace(samples[2], rollout_logprobs=far), *samples[3:]]
    report = updater.update(vetoed, 0)
    rest = make(folder, teacher, "hindsight_opd").update(samples[:2] + samples[3:], 0)
    assert np.isnan(report.advantages[2]).all()
    assert report.metrics["guard/rejected_tokens"] == len(far)
    assert report.metrics["loss"] == pytest.approx(rest.metrics["loss"], rel=1e-4)
