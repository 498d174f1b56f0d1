"""slime's own loss path with our hooks against the embedded trainer: advantages, loss, gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from records.types import ReadySample
from tests.slime.training import StepResult, arguments, prepare_process, run_step, train_data
from tests.trainer.slime.batches import SIDE, rows_of, samples_of, with_drawn, with_outcomes
from tests.trainer.tiny import load, save_model
from trainer.batch.token_batch import BatchTotals
from trainer.config import TrainerConfig
from trainer.model.policy import Policy
from trainer.step.update import Updater

pytestmark = [pytest.mark.slime, pytest.mark.timeout(600)]
TOLERANCE = 1e-5
STEP = 2
"""Batches before the one of a test."""

TOPK = {"topk": 8}
# Rejects some turns whole.
GEOMETRIC = {"rejections": [{"statistic": "geometric", "upper": 1.1}]}
CONFIGS: dict[str, dict[str, Any]] = {
    "hindsight_opd": {},
    "without_kl": {"beta_kl": 0.0},
    "entropy_bonus": {"beta_entropy": 0.01},
    "current_reference": {"objective": {"advantage_reference": "current"}},
    "normalised": {"objective": {"normalise": True}},
    "with_rewards": {"objective": {"reward_coef": 0.5}},
    "rewards_alone": {"objective": {"opd_coef": 0.0, "reward_coef": 1.0}},
    "rewards_by_step": {"objective": {"reward_coef": 1.0, "reward_baseline": "step"}},
    "replaced": {
        "objective": {
            "reward_coef": 1.0,
            "mix": "replace",
            "pass_rate_threshold": 0.5,
            "horizon": 2,
        }
    },
    "dual_clip": {"objective": {"dual_clip": 3.0}},
    "opsm": {"objective": {"opsm_delta": 0.1, "opsm_scope": "turn"}},
    "cispo": {"objective": {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 4.0}},
    "gspo": {"objective": {"surrogate": "gspo"}},
    "pure_is": {"objective": {"surrogate": "pure_is"}, "correction": {"mode": "pure_is"}},
    "unclipped_bypass": {
        "objective": {"surrogate": "unclipped", "advantage_reference": "current"},
        "correction": {"mode": "bypass"},
    },
    "decoupled": {
        "objective": {"surrogate": "decoupled"},
        "correction": {"importance_level": "none"},
    },
    "a3po": {"objective": {"surrogate": "a3po"}, "correction": {"importance_level": "none"}},
    "sequence_weights": {"correction": {"importance_level": "sequence"}},
    "geometric_rejection": {"correction": GEOMETRIC},
    "token_rejection": {"correction": {"rejections": [{"statistic": "token", "upper": 1.3}]}},
    "veto": {"correction": {"veto_threshold": 0.6}},
    "supervised": {"objective": {"name": "supervised_opd"}},
    "supervised_k3": {"objective": {"name": "supervised_opd", "estimator": "k3"}},
    "supervised_with_rewards": {"objective": {"name": "supervised_opd", "reward_coef": 0.5}},
    "forward_kl": {"objective": {"name": "forward_kl_topk", **TOPK}},
    "topk_tail": {"objective": {"name": "topk_tail_reverse_kl", **TOPK}},
    "topk_tail_with_rewards": {
        "objective": {"name": "topk_tail_reverse_kl", "reward_coef": 0.5, **TOPK}
    },
    "clamped": {"objective": {"loss_max_clamp": 0.1}},
    "self_distillation": {
        "objective": {"name": "self_distillation", "support_of": "teacher", **TOPK}
    },
    "sparse_kl": {"objective": {"name": "sparse_kl", "support_of": "teacher", **TOPK}},
    "reward_kl": {"beta_kl": 0.0, "objective": {"reward_coef": 1.0, "reward_kl_coef": 0.1}},
    "process": {
        "objective": {"reward_coef": 1.0, "reward_outcome": "only", "reward_baseline": "process"}
    },
    "warm_lengths": {
        "objective": {
            "reward_coef": 1.0,
            "length_penalty": "uniform",
            "length_coef": 0.1,
            "length_warmup_steps": 4,
        }
    },
    "token_mean": {"aggregation": "token-mean"},
    "seq_mean_turn_mean": {"aggregation": "seq-mean-turn-mean"},
    **SIDE,
}
# slime's own surrogate, of which a row's turns cannot be told apart by its KL and entropy.
POLICY_LOSS: dict[str, dict[str, Any]] = {
    "hindsight_opd": {"beta_kl": 0.0},
    "without_correction": {"beta_kl": 0.0, "correction": {"importance_level": "none"}},
    "sequence_weights": {"beta_kl": 0.0, "correction": {"importance_level": "sequence"}},
    "geometric_rejection": {"beta_kl": 0.0, "correction": GEOMETRIC},
    "normalised": {"beta_kl": 0.0, "objective": {"normalise": True}},
    "dual_clip": {"beta_kl": 0.0, "objective": {"dual_clip": 3.0}},
    "token_mean": {"beta_kl": 0.0, "aggregation": "token-mean"},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of the policy and of another model as its frozen start."""
    return (
        save_model(tmp_path_factory.mktemp("policy")),
        save_model(tmp_path_factory.mktemp("start"), seed=5),
    )


@pytest.fixture(scope="module")
def samples(models) -> list[ReadySample]:
    return samples_of(load(models[0]).freeze())


@pytest.fixture(scope="module", autouse=True)
def slime_process(slime_root, tmp_path_factory):
    prepare_process(slime_root, tmp_path_factory.mktemp("gloo") / "store")
    yield
    from megatron.core import mpu  # pyright: ignore[reportMissingImports]

    mpu.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def config_of(values: dict[str, Any]) -> TrainerConfig:
    return TrainerConfig.model_validate({"tensorboard": False, "micro_batch_tokens": 64} | values)


class Embedded:
    """The embedded trainer's own pass over a batch."""

    def __init__(self, config: TrainerConfig, models, samples, gaps, rows) -> None:
        self.policy = load(models[0])
        start = load(models[1]).freeze() if config.needs_start else None
        updater = Updater(self.policy, start, config)
        prepared = updater.preparation.prepare(samples, gaps, rows, step=STEP)
        self.totals: BatchTotals = updater.accumulate(prepared)
        self.metrics = self.totals.statistics()
        self.gradients = {
            name: parameter.grad
            for name, parameter in self.policy.model.named_parameters()
            if parameter.grad is not None
        }


def slime_step(
    config: TrainerConfig, models, samples, gaps, rows, folder, **changes: Any
) -> StepResult:
    args = arguments(config, folder, **({"max_tokens": 40} | changes))
    policy: Policy = load(models[0])
    start = load(models[1]).freeze().model if config.needs_start else None
    data = train_data(args, samples, rows, gaps, step=STEP)
    return run_step(args, data, policy.model, start)


def largest_gap(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    assert found.keys() == wanted.keys()
    assert max(float(one.abs().max()) for one in wanted.values()) > 1e-4
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted)


def per_turn(advantages: dict[int, torch.Tensor], rows) -> dict[int, np.ndarray]:
    """Rows' advantages by turn."""
    found = {}
    for index, row in enumerate(rows):
        values = advantages[index]
        first = row.spans[0].start
        for span in row.spans:
            found[span.turn] = values[span.start - first : span.end - first].numpy()
    return found


def assert_same_advantages(result: StepResult, embedded: Embedded, rows) -> None:
    found = per_turn(result.advantages, rows)
    assert found.keys() == embedded.totals.advantages.keys()
    for turn, wanted in embedded.totals.advantages.items():
        trained = np.isfinite(wanted)
        np.testing.assert_allclose(found[turn][trained], wanted[trained], atol=TOLERANCE)
        assert (found[turn][~trained] == 0).all()


@pytest.mark.parametrize("merged", [True, False], ids=["merged", "separate"])
@pytest.mark.parametrize("name", CONFIGS)
def test_our_loss_in_slime_is_the_embedded_trainers(name, merged, models, samples, tmp_path):
    config = config_of(CONFIGS[name])
    if name == "rewards_alone":
        # A turn with neither teacher nor reward is no sample.
        samples = [replace(one, reward=one.reward or -1.0) for one in samples]
    if name == "process":
        samples = with_outcomes(samples)
    if name in SIDE:
        samples = with_drawn(samples, load(models[1]), config)
    gaps = [index % 3 for index in range(len(samples))]
    rows = rows_of(samples, merged=merged)
    result = slime_step(config, models, samples, gaps, rows, tmp_path)
    embedded = Embedded(config, models, samples, gaps, rows)
    assert result.num_micro_batches > 1
    assert_same_advantages(result, embedded, rows)
    assert largest_gap(result.gradients, embedded.gradients) < TOLERANCE
    overlap = "opd/overlap_token_advantage"
    for key in embedded.totals.reduced.keys() - {overlap}:
        assert result.metrics[key] == pytest.approx(embedded.metrics[key], abs=TOLERANCE), key
    if overlap in embedded.metrics:
        mean = result.metrics[f"{overlap}_of_all"] / result.metrics["opd/overlapping_frac"]
        assert mean == pytest.approx(embedded.metrics[overlap], abs=TOLERANCE)
    for key, value in embedded.metrics.items():
        if key.startswith("opd/adv") or key == "teacher_student_absdiff":
            assert result.rollout[key] == pytest.approx(value, abs=TOLERANCE, nan_ok=True), key


@pytest.mark.parametrize("merged", [True, False], ids=["merged", "separate"])
@pytest.mark.parametrize("name", POLICY_LOSS)
def test_slimes_policy_loss_with_our_hooks_is_the_embedded_trainers(
    name, merged, models, samples, tmp_path
):
    config = config_of(POLICY_LOSS[name])
    gaps = [0] * len(samples)
    rows = rows_of(samples, merged=merged)
    result = slime_step(config, models, samples, gaps, rows, tmp_path, loss_type="policy_loss")
    embedded = Embedded(config, models, samples, gaps, rows)
    assert largest_gap(result.gradients, embedded.gradients) < TOLERANCE
    assert result.metrics["loss"] == pytest.approx(embedded.metrics["loss"], abs=TOLERANCE)
    if not merged and name == "hindsight_opd":
        assert_same_advantages(result, embedded, rows)
        for key in ("tis", "tis_abs", "tis_clipfrac", "train_rollout_logprob_abs_diff"):
            assert result.metrics[key] == pytest.approx(embedded.metrics[key], abs=TOLERANCE), key


def test_policy_loss_with_the_kl_to_the_start(models, samples, tmp_path):
    config = config_of({"beta_entropy": 0.01})
    gaps, rows = [0] * len(samples), rows_of(samples, merged=False)
    result = slime_step(config, models, samples, gaps, rows, tmp_path, loss_type="policy_loss")
    embedded = Embedded(config, models, samples, gaps, rows)
    assert largest_gap(result.gradients, embedded.gradients) < TOLERANCE
    for key in ("loss", "pg_loss", "kl_loss", "entropy_loss"):
        assert result.metrics[key] == pytest.approx(embedded.metrics[key], abs=TOLERANCE), key


@pytest.mark.parametrize(
    "name", ["hindsight_opd", "forward_kl", "supervised", "geometric_rejection"]
)
def test_every_sample_keeps_its_temperature(name, models, tmp_path):
    config = config_of(CONFIGS[name])
    samples = samples_of(load(models[0]).freeze(), temperatures=(1.0, 0.6))
    # At temperature 0 nothing can be compared: weight 1, ratio at temperature 1.
    samples[3] = replace(samples[3], temperature=0.0, distribution_modified="temperature_0")
    gaps, rows = [0] * len(samples), rows_of(samples, merged=True)
    result = slime_step(config, models, samples, gaps, rows, tmp_path)
    embedded = Embedded(config, models, samples, gaps, rows)
    if name == "geometric_rejection":
        # Those of another temperature that are rejected whole still count in the denominator.
        rejected = [np.isnan(embedded.totals.advantages[i]).all() for i in range(len(samples))]
        late = sum(samples[i].temperature == 0.6 for i in np.flatnonzero(rejected))
        kept = len(samples) - sum(rejected)
        assert late > 0
        scaled = {key: one * (kept + late) / kept for key, one in result.gradients.items()}
        assert largest_gap(scaled, embedded.gradients) < TOLERANCE
    else:
        assert largest_gap(result.gradients, embedded.gradients) < TOLERANCE
        assert result.metrics["train_rollout_logprob_abs_diff"] == pytest.approx(
            embedded.metrics["train_rollout_logprob_abs_diff"], abs=TOLERANCE
        )
    assert result.rollout["guard/modified_turns"] == 1
    assert result.rollout["guard/other_temperature_turns"] == 3


def test_one_micro_batch_or_many_are_the_same(models, samples, tmp_path):
    config = config_of({})
    gaps, rows = [0] * len(samples), rows_of(samples, merged=True)
    many = slime_step(config, models, samples, gaps, rows, tmp_path, max_tokens=8)
    one = slime_step(config, models, samples, gaps, rows, tmp_path, max_tokens=4096)
    assert (many.num_micro_batches, one.num_micro_batches) == (len(rows), 1)
    assert largest_gap(many.gradients, one.gradients) < TOLERANCE
    for key, value in one.metrics.items():
        assert many.metrics[key] == pytest.approx(value, abs=TOLERANCE), key
