"""The work of slime's hooks, without slime: the embedded trainer's gradients, and every refusal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rollout_bridge.merging import PackedSequence, merge_turns
from tests.trainer.slime.batches import (
    SIDE,
    rows_of,
    samples_of,
    with_drawn,
    with_lessons,
    with_outcomes,
)
from tests.trainer.slime.one_process import (
    OneProcess,
    arguments,
    backward,
    logits_of,
    rollout_data,
    step,
)
from tests.trainer.tiny import load, save_model
from trainer.config import TrainerConfig
from trainer.errors import DistillationOffError, NonFiniteError
from trainer.slime.advantages.of_rank import prepare
from trainer.slime.correction import correction_weights
from trainer.slime.loss import micro_batch_loss
from trainer.step.update import Updater

CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    "forward_kl": {"objective": {"name": "forward_kl_topk", "topk": 8}},
    "rewards": {"objective": {"reward_coef": 1.0, "reward_baseline": "prompt"}},
    "rewards_by_length": {"objective": {"reward_coef": 1.0, "length_penalty": "uniform"}},
    "rejection": {"correction": {"rejections": [{"statistic": "geometric", "upper": 1.1}]}},
    "supervised": {"objective": {"name": "supervised_opd"}, "aggregation": "token-mean"},
    "replaced_k2": {
        "objective": {
            "name": "supervised_opd",
            "reward_coef": 1.0,
            "mix": "replace",
            "pass_rate_threshold": 0.9,
            "horizon": 2,
        }
    },
    "behind_tools": {"correction": {"post_tool_upper": 1.01}},
    "best_of": {"objective": {"reward_coef": 1.0, "reward_best_of": 2}},
    "reward_kl": {"objective": {"reward_coef": 1.0, "reward_kl_coef": 0.1}},
    "warm_lengths": {
        "objective": {
            "reward_coef": 1.0,
            "length_penalty": "uniform",
            "length_coef": 0.1,
            "length_warmup_steps": 4,
        }
    },
    "process": {
        "objective": {"reward_coef": 1.0, "reward_outcome": "only", "reward_baseline": "process"}
    },
}
STEP = 2
"""Batches before the one of a test."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return (
        save_model(tmp_path_factory.mktemp("policy")),
        save_model(tmp_path_factory.mktemp("start"), seed=5),
    )


@pytest.fixture(scope="module")
def samples(folders):
    return samples_of(load(folders[0]).freeze())


@pytest.fixture
def policy(folders):
    return load(folders[0])


def config_of(**values: Any) -> TrainerConfig:
    return TrainerConfig.model_validate({"tensorboard": False, "beta_kl": 0.0} | values)


def tiny_data(policy, samples, **changes: Any) -> dict[str, Any]:
    return rollout_data(samples, merge_turns(samples), policy.model) | changes


def rewarded_names(config: TrainerConfig) -> set[str]:
    """Metrics that tell a reader what rewards were charged for, and how turns were valued."""
    objective = config.objective
    names = {"reward/start_kl"} if objective.charges_kl else set()
    return names | ({"reward/utility_mean"} if objective.values_turns else set())


@pytest.mark.parametrize(
    ("name", "lessons"),
    [
        *((name, False) for name in CONFIGS | SIDE),
        # Lessons have no side samples.
        *((name, True) for name in CONFIGS),
    ],
    ids=lambda value: value if isinstance(value, str) else "lessons" if value else "turns",
)
def test_gradients_are_the_embedded_trainers(name, lessons, folders, samples):
    config = config_of(beta_kl=0.02, **(CONFIGS | SIDE)[name])
    samples = with_outcomes(samples) if name == "process" else samples
    samples = with_drawn(samples, load(folders[1]), config) if name in SIDE else samples
    if name == "side_samples_with_rewards":
        samples = [rewarded_alone(samples[0]), *samples[1:]]
    samples = with_lessons(samples) if lessons else samples
    policy, start = load(folders[0]), load(folders[1]).freeze()
    rows = rows_of(samples, merged=True)
    data = rollout_data(samples, rows, policy.model, start.model, step=STEP)
    prepared, metrics = step(config, data, policy.model, [[2, 0], [1]])
    twin = load(folders[0])
    updater = Updater(twin, start, config)
    made = updater.preparation.prepare(samples, None, rows, step=STEP)
    wanted = updater.accumulate(made).statistics()
    assert prepared.metrics.keys() >= rewarded_names(config)
    for (key, one), other in zip(
        policy.model.named_parameters(), twin.model.parameters(), strict=True
    ):
        assert one.grad is not None, key
        torch.testing.assert_close(one.grad, other.grad, atol=1e-5, rtol=0)
    for key in ("loss", "opd/kl_loss", "kl_loss", "entropy_loss", "rollout_comparable_frac"):
        assert metrics[key] == pytest.approx(wanted[key], abs=1e-5), key
    if name in ("side_samples", "side_samples_old"):
        # The ratio is that to the weights that drew, which are not the learner's.
        assert metrics["opd/side_ratio_max"] == pytest.approx(wanted["opd/side_ratio_max"])
        assert metrics["opd/side_ratio_max"] > 1.5


def rewarded_alone(sample):
    """A turn that no teacher scored."""
    nothing = np.full_like(sample.teacher_logprobs, np.nan)
    return replace(
        sample, teacher_logprobs=nothing, teachings=(), hint="", reward=1.0, side_samples=None
    )


SEVERAL_STEPS = {
    "default": {},
    "forward_kl": {"objective": {"name": "forward_kl_topk", "topk": 8}},
    "topk_tail": {"objective": {"name": "topk_tail_reverse_kl", "topk": 8}},
    "current": {"objective": {"advantage_reference": "current"}},
    "rejection": {"correction": {"rejections": [{"statistic": "geometric", "upper": 1.1}]}},
    "behind_tools": {"correction": {"post_tool_upper": 1.01}},
    "lessons": {"objective": {"name": "topk_tail_reverse_kl", "topk": 8}},
    "side_samples": SIDE["side_samples"],
    "finite_cache_clipped": SIDE["finite_cache_clipped"],
}


@pytest.mark.parametrize(
    ("name", "temperatures"),
    [
        *((name, (1.0,)) for name in SEVERAL_STEPS),
        # Rejected turns of another temperature stay in slime's denominators.
        *((name, (1.0, 0.6)) for name in SEVERAL_STEPS if name != "rejection"),
    ],
)
def test_four_steps_on_a_batch_end_at_the_embedded_trainers_weights(name, temperatures, folders):
    config = config_of(
        beta_kl=0.02, epochs_per_batch=4, learning_rate=1e-2, adam_eps=1e-3, **SEVERAL_STEPS[name]
    )
    samples = samples_of(load(folders[0]).freeze(), temperatures=temperatures)
    samples = with_lessons(samples) if name == "lessons" else samples
    samples = with_drawn(samples, load(folders[1]), config) if name in SIDE else samples
    policy, start = load(folders[0]), load(folders[1]).freeze()
    rows = rows_of(samples, merged=True)
    data = rollout_data(samples, rows, policy.model, start.model, epochs=4)
    prepared = prepare(arguments(), data, config, OneProcess())
    assert len(prepared.advantages) == 4 * len(rows)
    parameters = policy.trainable_parameters()
    optimizer = torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=config.adam_betas,
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
    )
    for first in range(0, 4 * len(rows), len(rows)):
        optimizer.zero_grad()
        backward(data, policy.model, [[first + 2, first], [first + 1]])
        torch.nn.utils.clip_grad_norm_(parameters, config.grad_clip)
        optimizer.step()
    twin = load(folders[0])
    begun = [one.detach().clone() for one in twin.trainable_parameters()]
    assert Updater(twin, start, config).update(samples, 0, sequences=rows).skipped is None
    moved = 0.0
    for one, other, was in zip(parameters, twin.trainable_parameters(), begun, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=0)
        moved = max(moved, float((other - was).detach().abs().max()))
    assert moved > 1e-2


def test_a_later_step_with_other_rows_is_refused(policy, samples):
    data = rollout_data(samples, merge_turns(samples), policy.model, epochs=2)
    data["prompt"][3:] = data["prompt"][5:2:-1]
    for key in ("tokens", "loss_masks", "response_lengths", "total_lengths"):
        data[key][3:] = data[key][5:2:-1]
    with pytest.raises(ValueError, match="step 2 of 2 on a batch other rows"):
        prepare(arguments(), data, config_of(epochs_per_batch=2), OneProcess())


def test_a_later_step_needs_what_the_first_one_saw(policy, samples):
    data = rollout_data(samples, merge_turns(samples), policy.model, epochs=2)
    prepare(arguments(), data, config_of(epochs_per_batch=2), OneProcess())
    backward(data, policy.model, [[0, 1]])
    with pytest.raises(ValueError, match=r"step 2 on a batch has the rows \[2\]"):
        backward(data, policy.model, [[3, 4], [5]])


def test_rows_without_turns_change_nothing(folders, samples):
    config = config_of()
    rows = rows_of(samples, merged=True)
    padding = PackedSequence(ids=np.zeros(2, dtype=np.int32), spans=())
    gradients = []
    for extra, batches in (([], [[0, 1, 2]]), ([padding] * 2, [[0, 3], [4], [1, 2]])):
        policy = load(folders[0])
        data = rollout_data(samples, [*rows, *extra], policy.model)
        prepared, metrics = step(config, data, policy.model, batches)
        assert prepared.metrics["batch/sequences"] == 3
        assert metrics["guard/nonfinite_tokens"] == 0
        gradients.append([one.grad for one in policy.trainable_parameters()])
    for plain, padded in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, padded, atol=1e-6, rtol=0)


def test_a_step_of_rows_without_turns_has_a_gradient_of_zero(policy):
    padding = PackedSequence(ids=np.zeros(2, dtype=np.int32), spans=())
    data = rollout_data([], [padding, padding], policy.model)
    prepared, metrics = step(config_of(), data, policy.model, [[0], [1]])
    assert prepared.metrics["guard/empty_batch"] == 1
    assert metrics["loss"] == 0
    assert all(not one.grad.abs().any() for one in policy.trainable_parameters())


def test_what_the_batch_says_of_itself(policy, samples):
    changed = [
        replace(samples[0], temperature=0.0, distribution_modified="temperature_0"),
        replace(samples[1], temperature=0.6),
        *samples[2:],
    ]
    data = tiny_data(policy, changed)
    metrics = prepare(arguments(), data, config_of(), OneProcess()).metrics
    assert metrics["batch/turns"] == len(samples)
    assert metrics["batch/tokens"] == sum(len(one.response_ids) for one in samples)
    assert metrics["guard/modified_turns"] == 1
    assert metrics["guard/other_temperature_turns"] == 1
    assert metrics["opd/frac_opd_samples"] == 1
    assert metrics["opd/frac_tokens_with_kd"] == 1
    assert metrics["teacher_student_absdiff"] > 0.1
    assert "prompt" not in data


def test_a_batch_reports_all_of_rollout_correction_and_what_is_wrong_with_it(policy, samples):
    data = tiny_data(policy, samples)
    prepared = prepare(arguments(), data, config_of(), OneProcess())
    names = {name for name in prepared.metrics if name.startswith("rollout_corr/")}
    assert {"rollout_corr/post_tool/kl", "rollout_corr/other/kl", "rollout_corr/kl_fresh"} <= names
    assert len(names) > 40
    padding = PackedSequence(ids=np.zeros(2, dtype=np.int32), spans=())
    nothing = prepare(
        arguments(), rollout_data([], [padding], policy.model), config_of(), OneProcess()
    )
    # slime takes the same keys from every batch.
    assert names == {name for name in nothing.metrics if name.startswith("rollout_corr/")}
    assert nothing.warnings == ()

    moved = [
        replace(one, rollout_logprobs=one.rollout_logprobs - np.float32(1.0)) for one in samples
    ]
    warned = prepare(arguments(), tiny_data(policy, moved), config_of(), OneProcess()).warnings
    assert any("trainer and rollout engine are far apart" in line for line in warned)


def test_a_turn_without_a_teacher_learns_from_its_reward(policy, samples):
    nothing = np.full_like(samples[0].teacher_logprobs, np.nan)
    untaught = replace(samples[0], teacher_logprobs=nothing, teachings=(), hint="", reward=1.0)
    batch = [untaught, *(replace(one, reward=-1.0) for one in samples[1:])]
    config = config_of(objective={"reward_coef": 0.5})
    rows = rows_of(batch, merged=False)
    data = rollout_data(batch, rows, policy.model)
    prepared = prepare(arguments(), data, config, OneProcess())
    torch.testing.assert_close(prepared.advantages[0], torch.full((5,), 0.5))
    assert prepared.metrics["opd/num_eligible_samples"] == len(samples) - 1
    assert prepared.metrics["opd/frac_opd_samples"] == (len(samples) - 1) / len(samples)


def test_too_many_tokens_that_are_not_numbers(policy, samples):
    data = tiny_data(policy, samples)
    data["log_probs"][0][-1] = torch.nan
    with pytest.raises(NonFiniteError, match="1 of 42 tokens"):
        prepare(arguments(), data, config_of(), OneProcess())
    data = tiny_data(policy, samples)
    data["log_probs"][0][-1] = torch.nan
    prepared = prepare(arguments(), data, config_of(max_nonfinite_frac=0.1), OneProcess())
    assert prepared.metrics["guard/nonfinite_tokens"] == 1
    assert all(torch.isfinite(values).all() for values in prepared.advantages)


def test_a_loss_without_gradient_stops_training(policy, samples):
    # Every token of a student that says what the teacher does not is beyond this clamp.
    config = config_of(
        objective={"name": "supervised_opd", "estimator": "k2", "loss_max_clamp": 1e-9}
    )
    data = tiny_data(policy, samples)
    with pytest.raises(DistillationOffError, match="no gradient"):
        step(config, data, policy.model, [[0], [1], [2]])


def test_logits_that_are_not_numbers_reach_no_gradient(policy, samples):
    data = tiny_data(policy, samples)
    prepare(arguments(), data, config_of(), OneProcess())
    batch = {key: data[key] for key in ("total_lengths", "response_lengths", "loss_masks")}
    batch["rollout_log_probs"] = data["rollout_log_probs"]
    logits = logits_of(policy.model, data["tokens"]).detach()
    place = OneProcess().scoring_places(None, batch, logits.shape[1])[1][-1]
    logits[0, place] = torch.nan
    logits[0, 0] = torch.nan
    logits.requires_grad_()
    loss, metrics = micro_batch_loss(arguments(), batch, logits, OneProcess())
    loss.backward()
    assert torch.isfinite(loss)
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert not logits.grad[0, place].any()
    assert metrics["guard/nonfinite_tokens"] == data["global_batch_sizes"][0]


def test_correction_takes_tokens_out_of_slimes_masks(policy, samples):
    config = config_of(
        correction={
            "importance_level": "token",
            "rejections": [{"statistic": "token", "upper": 1.3}],
        }
    )
    data = tiny_data(policy, samples)
    prepared = prepare(arguments(), data, config, OneProcess())
    weights, masks, metrics = correction_weights(
        data["log_probs"], data["rollout_log_probs"], data["loss_masks"], OneProcess()
    )
    lost = sum(int((old - new).sum()) for old, new in zip(data["loss_masks"], masks, strict=True))
    assert lost == prepared.metrics["guard/rejected_tokens"] > 0
    assert metrics["tis_rejected_frac"].sum() == lost
    assert weights.shape == torch.cat(data["log_probs"]).shape
    assert weights.max() <= 2.0


def test_the_loss_needs_the_advantage_hook(policy, samples):
    data = tiny_data(policy, samples)
    with pytest.raises(ValueError, match="custom-advantage-function-path"):
        micro_batch_loss(arguments(), data, torch.zeros(1, 200, 64), OneProcess())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_probs": None}, "did not compute log_probs"),
        ({"prompt": None}, "no carrier per row"),
        ({"num_microbatches": [1, 1]}, "2 steps of one batch"),
    ],
)
def test_data_that_slime_was_not_told_to_give(change, message, policy, samples):
    with pytest.raises(ValueError, match=message):
        prepare(arguments(), tiny_data(policy, samples, **change), config_of(), OneProcess())


def test_rows_that_are_not_those_of_their_carriers(policy, samples):
    data = tiny_data(policy, samples)
    data["tokens"][0][-1] = (data["tokens"][0][-1] + 1) % 64
    with pytest.raises(ValueError, match="has other tokens"):
        prepare(arguments(), data, config_of(), OneProcess())
    data = tiny_data(policy, samples)
    data["prompt"][0], data["prompt"][1] = data["prompt"][1], data["prompt"][0]
    with pytest.raises(ValueError, match="its row has"):
        prepare(arguments(), data, config_of(), OneProcess())
    data = tiny_data(policy, samples)
    data["loss_masks"][0][-1] = 0
    with pytest.raises(ValueError, match="loss mask"):
        prepare(arguments(), data, config_of(), OneProcess())
    data = tiny_data(policy, samples)
    kept = {key: value[:-1] for key, value in data.items() if isinstance(value, list)}
    data |= kept | {"num_microbatches": [1], "global_batch_sizes": [2]}
    with pytest.raises(ValueError, match="6 turns of a batch of 8"):
        prepare(arguments(), data, config_of(), OneProcess())


def test_a_turn_that_lacks_what_the_objective_needs(policy, samples):
    lacking = replace(samples[0], teachings=())
    data = tiny_data(policy, [lacking, *samples[1:]])
    config = config_of(objective={"name": "forward_kl_topk", "topk": 8})
    with pytest.raises(ValueError, match=r"turn a-0 cannot train .teacher_logprobs_invalid."):
        prepare(arguments(), data, config, OneProcess())


def test_policy_loss_refuses_what_it_would_get_wrong(policy, samples):
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.02}
    args = arguments(loss_type="policy_loss", entropy_coef=0.0, **kl)
    with pytest.raises(ValueError, match="rows, which hold several turns"):
        prepare(args, tiny_data(policy, samples), config_of(), OneProcess())
    heated = [replace(samples[0], temperature=0.6), *samples[1:]]
    args = arguments(loss_type="policy_loss", use_kl_loss=False, entropy_coef=0.0)
    with pytest.raises(ValueError, match=r"sampled at temperature 0\.6"):
        prepare(args, tiny_data(policy, heated), config_of(), OneProcess())


def test_lessons_are_reported_by_kind_as_in_the_embedded_trainer(folders, samples):
    config, mixed = config_of(), with_lessons(samples)
    policy = load(folders[0])
    data = rollout_data(mixed, rows_of(mixed, merged=True), policy.model)
    metrics = prepare(arguments(), data, config, OneProcess()).metrics
    wanted = Updater(load(folders[0]), None, config).update(mixed, 0).metrics
    gaps = [key for key in wanted if key.startswith("lessons/gap_")]
    assert sorted(gaps) == [f"lessons/gap_{kind}" for kind in ("counter", "hint", "keep", "live")]
    for key in gaps:
        assert metrics[key] == pytest.approx(wanted[key], abs=1e-6), key
    data = rollout_data(samples, rows_of(samples, merged=True), policy.model)
    metrics = prepare(arguments(), data, config, OneProcess()).metrics
    assert not [key for key in metrics if key.startswith("lessons/")]
