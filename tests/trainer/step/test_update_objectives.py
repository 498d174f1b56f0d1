"""Every objective through the whole update: teachers in the trainer, merged turns, epochs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from records.names import DropReason
from records.types import ReadySample, Teaching
from tests.rollout_bridge.separate import separate_turns
from tests.trainer.step.test_update import largest_difference, mixed_batch, weights
from tests.trainer.tiny import load, random_ids, save_model
from trainer.batch.collate import score_batches
from trainer.batch.token_batch import BatchTotals
from trainer.batch.views import support_ids
from trainer.config import TrainerConfig
from trainer.errors import NonFiniteError
from trainer.model.teacher_models import EmaTeacher
from trainer.step.update import Updater

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
    "reward_kl": {"objective": {"reward_coef": 1.0, "reward_kl_coef": 0.1}},
    "replaced_k2": {
        "objective": {
            "name": "supervised_opd",
            "reward_coef": 1.0,
            "mix": "replace",
            "pass_rate_threshold": 0.5,
            "horizon": 2,
        }
    },
    "added_k2": {
        "objective": {
            "name": "supervised_opd",
            "opd_coef": 0.1,
            "reward_coef": 1.0,
            "pass_rate_threshold": 0.5,
            "horizon": 2,
        }
    },
    "behind_tools": {"correction": {"post_tool_upper": 1.01}},
    "cispo": {"objective": {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 4.0}},
    "gspo": {"objective": {"surrogate": "gspo"}},
    "gspo_sequence": {"objective": {"surrogate": "gspo_sequence"}},
    "clamped": {"objective": {"loss_max_clamp": 0.2}},
    "normalised_abs": {"objective": {"normalise": True, "estimator": "abs"}},
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
    "side_samples_forward": {
        "objective": {"name": "side_samples", "samples": 8, "direction": "forward"},
        **FROZEN,
    },
    "sparse_kl": {"objective": {"name": "sparse_kl", "topk": 8}, **FROZEN},
    "k3_with_rewards": {
        "objective": {"name": "supervised_opd", "estimator": "k3", "reward_coef": 0.5}
    },
    "forward_kl_with_rewards": {
        "objective": {"name": "forward_kl_topk", "topk": 8, "reward_coef": 0.5},
        **FROZEN,
    },
    "topk_tail_with_rewards": {
        "objective": {"name": "topk_tail_reverse_kl", "topk": 8, "reward_coef": 0.5},
        **FROZEN,
    },
    "self_distillation_with_rewards": {
        "objective": {"name": "self_distillation", "topk": 8, "reward_coef": 0.5},
        **FROZEN,
    },
    "side_samples_with_rewards": {
        "objective": {"name": "side_samples", "samples": 8, "reward_coef": 0.5},
        **FROZEN,
    },
    "sparse_kl_with_rewards": {
        "objective": {"name": "sparse_kl", "topk": 8, "reward_coef": 0.5},
        **FROZEN,
    },
    "batch_normalised_weights": {"correction": {"batch_normalize": True}},
    "rejection": {"correction": {"rejections": [{"statistic": "token", "upper": 5.0}]}},
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return load(save_model(tmp_path_factory.mktemp("teacher"), seed=7)).freeze()


def make(folder, teacher, name: str, **options) -> Updater:
    values = {"learning_rate": 1e-3, "tensorboard": False, "beta_kl": 0.0} | CONFIGS[name] | options
    config = TrainerConfig.model_validate(values)
    own = teacher if config.teacher.in_trainer else None
    # Not the policy's own weights, from which it would be nowhere apart.
    reference = teacher if config.needs_start else None
    return Updater(load(folder), reference, config, teacher=own)


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
    drawn = {one.turn_id: one for one in updater.draw_side_samples(samples)}
    return [drawn.get(one.turn_id, one) for one in samples]


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


@pytest.mark.parametrize("name", CONFIGS)
def test_passes_after_the_first_compare_with_the_student_before_the_step(folder, teacher, name):
    updater = make(folder, teacher, name, epochs_per_batch=2)
    batch = updater.preparation.prepare(prepared(updater, taught(1)), [1] * 7)
    supports = support_ids(batch.views) or None
    before = score_batches(updater.policy, batch.batches, support_ids=supports)
    updater.accumulate(batch, found := {})
    repeated = batch.repeated(found)
    assert repeated.before is not None
    for view, earlier, own, one in zip(
        repeated.views, batch.views, repeated.before, before, strict=True
    ):
        torch.testing.assert_close(own.logprobs, one.logprobs)
        torch.testing.assert_close(own.logprobs_sampled, one.logprobs_sampled)
        if view.support is not None and earlier.support.old is None:
            torch.testing.assert_close(view.support.old, one.support)


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
    from trainer.model.teacher_models import TrustRegionTeacher

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
    assert report.untrained == {2: DropReason.ROLLOUT_REJECTED}
    assert report.metrics["guard/rejected_tokens"] == len(far)
    assert report.metrics["loss"] == pytest.approx(rest.metrics["loss"], rel=1e-4)


def test_a_batch_that_correction_rejects_whole_says_so(folder, teacher):
    rules = {"rejections": [{"statistic": "token", "upper": 1.0 + 1e-9, "lower": 1.0 - 1e-9}]}
    updater = make(folder, teacher, "hindsight_opd", correction=rules)
    report = updater.update(taught(1), 0)
    assert report.skipped is DropReason.ROLLOUT_REJECTED
    assert set(report.untrained) == set(range(7))


def untaught(seed: int) -> list[ReadySample]:
    return [
        dataclasses.replace(
            one,
            teachings=(),
            hint="",
            teacher_logprobs=np.full(len(one.response_ids), np.nan, np.float32),
        )
        for one in taught(seed)
    ]


def test_a_threshold_keeps_the_teacher_from_answers_that_need_none(folder, teacher):
    """Rewards act on every turn, K2 on the first tokens of the failed ones alone."""
    updater = make(folder, teacher, "added_k2")
    batch = prepared(updater, taught(1))
    views = updater.preparation.prepare(batch).views
    for view, one in zip(views, batch, strict=True):
        assert view.reward_advantage.tolist() == [one.reward] * len(one.response_ids)
        assert not view.opd_valid[2:].any()
    failed = [one.reward is not None and one.reward <= 0 for one in batch]
    assert [bool(view.opd_valid.any()) for view in views] == failed
    assert {True, False} == set(failed)


REWARDED = [name for name, one in CONFIGS.items() if one.get("objective", {}).get("reward_coef")]


@pytest.mark.parametrize("name", [name for name in REWARDED if name != "replaced"])
def test_rewards_alone_train_whatever_the_noise(folder, teacher, name):
    """No teacher: no gap that noise could drown, and no distillation term that could be dead."""
    updater = make(folder, teacher, name)
    updater.noise = 100.0
    before = weights(updater)
    report = updater.update(prepared(updater, untaught(1)), 0)
    assert report.skipped is None
    assert report.metrics["opd/num_eligible_samples"] == 0
    assert np.isnan(report.metrics["teacher_student_absdiff"])
    assert largest_difference(before, weights(updater)) > 1e-4


@pytest.mark.parametrize("name", ["normalised", "topk_tail", "supervised"])
def test_noise_is_compared_with_the_gap_as_it_is(folder, teacher, name):
    """Standardised advantages have a spread of 1 whatever the gap is."""
    updater = make(folder, teacher, name)
    updater.noise = 100.0
    assert updater.update(taught(1), 0).skipped is DropReason.BELOW_NOISE


@pytest.mark.parametrize("name", ["hindsight_opd", "hybrid"])
def test_turns_without_a_teacher_do_not_dilute_the_gap(folder, teacher, name):
    half = [*taught(1)[:3], *untaught(1)[3:]]
    alone = make(folder, teacher, name).update(half[:3], 0).metrics
    mixed = make(folder, teacher, name).update(half, 0).metrics
    same = pytest.approx(alone["teacher_student_absdiff"], rel=1e-4)
    assert mixed["teacher_student_absdiff"] == same


class Breaking:
    """A teacher in the trainer whose logits overflow on sequences that begin with `first`."""

    def __init__(self, model, first: int):
        self.model, self.first = model, first

    def token_logprobs(self, ids_BT, *arguments):
        found = self.model.token_logprobs(ids_BT, *arguments)
        broken_BT = torch.where(ids_BT[:, :1] == self.first, torch.nan, found.logprobs_BT)
        return dataclasses.replace(found, logprobs_BT=broken_BT)


class Overflowing(Breaking):
    """The same, at a token of the support."""

    def token_logprobs(self, ids_BT, *arguments):
        found = self.model.token_logprobs(ids_BT, *arguments)
        if found.support_BTK is None:
            return found
        begins = ids_BT[:, :1, None] == self.first
        broken_BTK = torch.where(begins, -torch.inf, found.support_BTK)
        return dataclasses.replace(found, support_BTK=broken_BTK)


def beginning_with(sample: ReadySample, token: int) -> ReadySample:
    (first, second) = sample.teachings
    hinted = np.concatenate([np.array([token], dtype=np.int32), first.hinted_prompt_ids[1:]])
    return dataclasses.replace(
        sample, teachings=(dataclasses.replace(first, hinted_prompt_ids=hinted), second)
    )


def test_what_a_teacher_in_the_trainer_cannot_score_is_dropped_alone(folder, teacher):
    broken = Breaking(teacher, first=3)
    samples = [beginning_with(one, 3 if index == 4 else 5) for index, one in enumerate(taught(1))]
    report = make(folder, broken, "topk_tail").update(samples, 0, version_gaps=[1] * 7)
    rest = [*samples[:4], *samples[5:]]
    alone = make(folder, broken, "topk_tail").update(rest, 0, version_gaps=[1] * 6)
    assert report.skipped is None
    assert report.untrained == {4: DropReason.TEACHER_LOGPROBS_INVALID}
    assert np.isnan(report.advantages[4]).all()
    np.testing.assert_array_equal(report.advantages[5], alone.advantages[4])
    assert report.metrics["loss"] == alone.metrics["loss"]
    assert report.metrics["guard/teacher_invalid_turns"] == 1
    assert alone.metrics["guard/teacher_invalid_turns"] == 0


def test_a_teacher_that_scores_nothing_stops_training_and_drops_a_lone_turn(folder, teacher):
    updater = make(folder, Breaking(teacher, first=3), "topk_tail")
    before = weights(updater)
    samples = [beginning_with(one, 3) for one in taught(1)]
    with pytest.raises(NonFiniteError, match="any of 7 turns"):
        updater.update(samples, 0)
    report = updater.update(samples[:1], 0)
    assert report.skipped is DropReason.TEACHER_LOGPROBS_INVALID
    assert report.untrained == {0: DropReason.TEACHER_LOGPROBS_INVALID}
    assert largest_difference(before, weights(updater)) == 0.0


def test_an_infinite_score_of_a_side_sample_drops_its_turn(folder, teacher):
    updater = make(folder, Overflowing(teacher, first=3), "side_samples")
    samples = [beginning_with(one, 3 if index == 4 else 5) for index, one in enumerate(taught(1))]
    report = updater.update(prepared(updater, samples), 0)
    assert report.skipped is None
    assert report.untrained == {4: DropReason.TEACHER_LOGPROBS_INVALID}


def test_bypass_reports_the_gap_to_the_engine_and_not_the_clips_anchor(folder, teacher):
    direct = make(folder, teacher, "hindsight_opd").update(taught(1), 0).metrics
    bypass = make(folder, teacher, "unclipped_async").update(taught(1), 0).metrics
    for name in ("train_rollout_logprob_abs_diff", "tis_abs"):
        assert bypass[name] == pytest.approx(direct[name], rel=1e-4)
        assert bypass[name] > 0.01


def test_the_choice_among_hints_is_reported(folder, teacher):
    metrics = make(folder, teacher, "overlap_topk").update(taught(1), 0).metrics
    assert 0 <= metrics["opd/sel_k_star_mean"] <= 1
    assert 0 <= metrics["opd/sel_overlap_at_k_star"] <= 4
    assert metrics["opd/kd_coef"] == 1.0
    assert "opd/sel_k_star_mean" not in make(folder, teacher, "topk_tail").expected_keys


def test_ranges_hold_the_means(folder, teacher):
    metrics = make(folder, teacher, "forward_kl").update(taught(1), 0).metrics
    for name in ("opd/student_mass", "opd/teacher_mass"):
        assert metrics[f"{name}_min"] < metrics[name] < metrics[f"{name}_max"] <= 1.0 + 1e-5
    assert metrics["opd/loss_min"] < metrics["opd/kl_loss"] < metrics["opd/loss_max"]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_objective_reports_its_size_and_its_extremes(folder, teacher, name):
    updater = make(folder, teacher, name)
    metrics = updater.update(prepared(updater, taught(1)), 0).metrics
    low, high = metrics["opd/loss_min"], metrics["opd/loss_max"]
    assert low <= high
    assert 0 <= metrics["opd/abs_loss"] <= max(abs(low), abs(high)) * (1 + 1e-5)


def test_a_mean_over_some_tokens_is_divided_by_their_share():
    totals = BatchTotals(
        reduced={"opd/overlap_token_advantage": -0.2, "opd/overlapping_frac": 0.5},
        sums=dict.fromkeys(("adv", "adv_squared", "adv_positive", "gap_abs"), 0.0)
        | {"tokens": 2.0, "tokens_with_teacher": 0.0},
        maxima={"adv_abs_max": 0.0, "ratio_max": 1.0},
    )
    assert totals.statistics()["opd/overlap_token_advantage"] == pytest.approx(-0.4)
    totals.reduced["opd/overlapping_frac"] = 0.0
    assert np.isnan(totals.statistics()["opd/overlap_token_advantage"])


def test_too_few_tokens_to_normalise_are_counted(folder, teacher):
    many = make(folder, teacher, "normalised").update(taught(1), 0).metrics
    assert many["opd/unnormalised_tokens"] == 0
    (one,) = [one for one in taught(1) if len(one.response_ids) == 4][:1]
    single = dataclasses.replace(
        one,
        response_ids=one.response_ids[:1],
        rollout_logprobs=one.rollout_logprobs[:1],
        teacher_logprobs=one.teacher_logprobs[:1],
        version_spans=(dataclasses.replace(one.version_spans[0], start=0, end=1),),
        teachings=(),
    )
    few = make(folder, teacher, "normalised").update([single], 0).metrics
    assert few["opd/unnormalised_tokens"] == 1
