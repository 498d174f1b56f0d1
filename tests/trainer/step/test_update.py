from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from records.lessons.names import LessonKind
from records.names import DropReason
from records.types import ReadySample
from rollout_bridge.merging import merge_turns
from tests.rollout_bridge.separate import separate_turns
from tests.trainer.tiny import conversation, load, random_ids, sample
from trainer.batch.collate import build_micro_batch, score_batches
from trainer.batch.token_batch import BatchTotals
from trainer.calibration.calibrate import own_logprobs
from trainer.config import LoraConfig, TrainerConfig
from trainer.errors import DistillationOffError, NonFiniteError
from trainer.model.policy import WithoutAdapters
from trainer.objectives.frame import objective_loss
from trainer.step.update import Updater, learning_rate_at, teaches


def make(folder, *, noise=0.0, reference=True, **options) -> Updater:
    config = TrainerConfig(**({"learning_rate": 1e-2, "tensorboard": False} | options))
    policy = load(folder, chunk_tokens=config.logprob_chunk_tokens, lora=config.lora)
    frozen = load(folder).freeze() if reference and config.beta_kl > 0 else None
    if config.lora is not None:
        frozen = WithoutAdapters(policy)
    return Updater(policy, frozen, config, noise=noise)


def weights(updater: Updater) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in updater.policy.model.named_parameters()}


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def mixed_batch(seed: int) -> list:
    """A session of four turns of unequal length, one dropped, with tool output in between; a
    session whose history was rewritten; two siblings. Temperatures differ.
    """
    generator = np.random.default_rng(seed)
    samples = conversation(
        "tools", [(9, 4), (7, 11), (3, 2), (12, 6)], seed=seed, skip=[1], temperature=0.8
    )
    samples += conversation("short", [(4, 3), (2, 5)], seed=seed + 1)
    prompt = random_ids(generator, 6)
    for name in ("one", "two"):
        reply = random_ids(generator, 4)
        samples.append(sample(prompt, reply, turn_id=name, session_id="siblings", seed=seed))
    return samples


@pytest.mark.parametrize("micro_batch_tokens", [8192, 40])
def test_lessons_that_hold_the_policy_weigh_more(folder, micro_batch_tokens):
    """Their gradient alone is multiplied, whatever lies beside them in a pass."""
    kinds = (None, LessonKind.HINT, LessonKind.COUNTER, LessonKind.KEEP)
    samples = [
        dataclasses.replace(one, lesson=kind)
        for one, kind in zip(
            conversation("one", [(6, 5), (4, 7), (3, 6), (5, 4)], seed=3), kinds, strict=True
        )
    ]

    def gradients(hold_weight: float, teach: tuple[bool, ...]) -> dict[str, torch.Tensor]:
        options = {"beta_kl": 0.0, "micro_batch_tokens": micro_batch_tokens}
        updater = make(folder, lesson_hold_weight=hold_weight, **options)
        prepared = updater.preparation.prepare(samples, sequences=separate_turns(samples))
        views = [
            view
            if is_taught
            else dataclasses.replace(view, opd_valid=torch.zeros_like(view.teacher))
            for view, is_taught in zip(prepared.views, teach, strict=True)
        ]
        updater.accumulate(dataclasses.replace(prepared, views=views))
        parameters = updater.policy.model.named_parameters()
        return {name: one.grad.clone() for name, one in parameters if one.grad is not None}

    hinted = gradients(1.0, (True, True, False, False))
    holding = gradients(1.0, (False, False, True, True))
    both = gradients(3.0, (True, True, True, True))
    assert max(float(one.abs().max()) for one in holding.values()) > 1e-3
    for name, one in both.items():
        torch.testing.assert_close(one, hinted[name] + 3.0 * holding[name], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("micro_batch_tokens", [8192, 40])
def test_merged_and_separate_turns_train_alike_over_several_steps(folder, micro_batch_tokens):
    """A large epsilon keeps AdamW from turning rounding in a tiny gradient into a full step, which
    would say nothing about the merge.
    """
    options = {"micro_batch_tokens": micro_batch_tokens, "adam_eps": 1e-2}
    start = weights(make(folder))
    merged, separate = make(folder, **options), make(folder, **options)
    for step in range(4):
        samples = mixed_batch(10 * step)
        packed = merge_turns(samples)
        assert len(packed) < len(samples)
        one = merged.update(samples, step, sequences=packed)
        other = separate.update(samples, step, sequences=separate_turns(samples))
        for name in merged.expected_keys - {"sequences", "tokens_computed"}:
            mine, theirs = one.metrics[name], other.metrics[name]
            if name == "rollout_corr/chi2_seq":
                # Exponential in a sequence's sum, and so is its rounding: compared as a logarithm.
                mine, theirs = math.log1p(mine), math.log1p(theirs)
            assert mine == pytest.approx(theirs, abs=1e-5, rel=1e-5), name
        assert one.metrics["grad_norm"] == pytest.approx(other.metrics["grad_norm"], rel=1e-5)
        assert one.metrics["tokens_computed"] < other.metrics["tokens_computed"]
        for mine, theirs in zip(one.advantages, other.advantages, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-5)
    assert largest_difference(weights(merged), weights(separate)) < 1e-5
    assert largest_difference(weights(merged), start) > 1e-3


def test_merged_and_separate_gradients_are_equal_parameter_by_parameter(folder):
    for step in range(3):
        samples = mixed_batch(7 + step)
        gradients = []
        for packed in (merge_turns(samples), separate_turns(samples)):
            updater = make(folder, micro_batch_tokens=1)
            updater.accumulate(updater.preparation.prepare(samples, sequences=packed))
            gradients.append([p.grad for p in updater.policy.trainable_parameters()])
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_gradient_is_that_of_the_formula(folder):
    """One turn, one token, by hand: at ratio 1 the gradient is -A w grad log pi."""
    one = sample(np.array([1, 2, 3], np.int32), np.array([5], np.int32))
    updater = make(folder, beta_kl=0.0)
    policy = updater.policy
    logprob = policy.token_logprobs(torch.tensor([[1, 2, 3, 5]]), torch.tensor([[0, 0, 0, 1.0]]))
    value = logprob.logprobs_BT[0, 3]
    expected = torch.autograd.grad(value, policy.trainable_parameters())
    advantage = float(one.teacher_logprobs[0]) - value.item()
    weight = min(np.exp(value.item() - float(one.rollout_logprobs[0])), 2.0)
    updater.accumulate(updater.preparation.prepare([one]))
    for parameter, gradient in zip(policy.trainable_parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, -advantage * weight * gradient)


def test_a_step_raises_what_the_teacher_prefers(folder):
    samples = [
        dataclasses.replace(one, teacher_logprobs=np.full_like(one.teacher_logprobs, -0.01))
        for one in mixed_batch(3)
    ]
    updater = make(folder, learning_rate=1e-3)
    first = updater.update(samples, 0).metrics["teacher_student_absdiff"]
    for step in range(1, 20):
        last = updater.update(samples, step).metrics["teacher_student_absdiff"]
    assert last < 0.8 * first


def test_same_samples_and_seed_give_identical_weights(folder):
    runs = []
    for _ in range(2):
        updater = make(folder, lora=LoraConfig(rank=2, alpha=4), micro_batch_tokens=60)
        for step in range(3):
            updater.update(mixed_batch(step), step)
        runs.append(weights(updater))
    assert largest_difference(*runs) == 0.0


def test_adapters_train_and_the_base_does_not(folder):
    updater = make(folder, lora=LoraConfig(rank=2, alpha=4))
    before = weights(updater)
    report = updater.update(mixed_batch(1), 0)
    assert report.skipped is None
    after = weights(updater)
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed
    assert all("lora_" in name for name in changed)
    metrics = updater.update(mixed_batch(1), 1).metrics
    assert metrics["kl_loss"] > 0
    expected = abs(updater.config.beta_kl * metrics["kl_loss"] / metrics["pg_loss"])
    assert metrics["kl_to_pg_ratio"] == pytest.approx(expected)


def test_epochs_take_several_steps_with_a_real_ratio(folder):
    updater = make(folder, epochs_per_batch=3, learning_rate=1e-3)
    report = updater.update(mixed_batch(1), 0)
    assert report.metrics["ratio_max"] != 1.0
    assert report.metrics["ppo_kl"] != 0.0
    once = make(folder, learning_rate=1e-3).update(mixed_batch(1), 0)
    assert once.metrics["ratio_max"] == 1.0
    for one, other in zip(once.advantages, report.advantages, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_one_epoch_equals_the_explicit_old_pass(folder):
    """Taking old = current.detach() is the shortcut of a separate pass over the same weights."""
    samples = mixed_batch(2)
    updater = make(folder)
    prepared = updater.preparation.prepare(samples)
    assert prepared.before is None
    before = score_batches(updater.policy, prepared.batches)
    short = updater.accumulate(prepared)
    long = updater.accumulate(dataclasses.replace(prepared, before=before))
    assert short.reduced == pytest.approx(long.reduced, abs=1e-6)


def test_noise_is_no_reason_to_step(folder):
    updater = make(folder, noise=1.0)
    before = weights(updater)
    report = updater.update(mixed_batch(1), 0)
    assert report.skipped is DropReason.BELOW_NOISE
    assert largest_difference(before, weights(updater)) == 0.0
    assert not updater.optimizer.state


def test_a_teacher_equal_to_the_student_gives_no_advantage(folder):
    updater = make(folder, beta_kl=0.0, noise=1e-6)
    samples = mixed_batch(1)
    own = score_batches(updater.policy, [build_micro_batch(separate_turns(samples))])
    same = [
        dataclasses.replace(one, teacher_logprobs=scores.logprobs.numpy())
        for one, scores in zip(samples, own, strict=True)
    ]
    report = updater.update(same, 0)
    assert report.metrics["opd/adv_abs_max"] < 1e-5
    assert report.skipped is DropReason.BELOW_NOISE


def test_advantages_of_exactly_zero_are_skipped_even_without_noise(folder):
    updater = make(folder, beta_kl=0.0, noise=0.0)
    before = weights(updater)

    def no_advantage(batch, *settings):
        same = dataclasses.replace(batch, teacher_logprobs_BT=batch.old_logprobs_BT)
        return objective_loss(same, *settings)

    updater.loss_function = no_advantage
    report = updater.update(mixed_batch(1), 0)
    assert report.metrics["opd/adv_abs_max"] == 0.0
    assert report.skipped is DropReason.BELOW_NOISE
    assert largest_difference(before, weights(updater)) == 0.0


def test_a_gradient_that_is_not_finite_changes_nothing(folder):
    updater = make(folder, beta_kl=0.0)
    before = weights(updater)
    first = updater.policy.trainable_parameters()[0]
    handle = first.register_hook(lambda gradient: gradient * float("inf"))
    report = updater.update(mixed_batch(1), 0)
    handle.remove()
    assert report.skipped is DropReason.NONFINITE_GRADIENT
    assert largest_difference(before, weights(updater)) == 0.0


def test_too_many_nonfinite_logprobs_raise(folder):
    updater = make(folder, beta_kl=0.0)
    with torch.no_grad():
        updater.policy.trainable_parameters()[0].fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="non-finite"):
        updater.update(mixed_batch(1), 0)


def test_distillation_without_gradient_is_noticed_at_the_first_step(folder):
    updater = make(folder, beta_kl=0.0)
    for parameter in updater.policy.trainable_parameters():
        parameter.register_hook(torch.zeros_like)
    with pytest.raises(DistillationOffError, match="no gradient"):
        updater.update(mixed_batch(1), 0)


def test_a_missing_metric_is_noticed(folder):
    updater = make(folder)

    def silent(*arguments):
        result = objective_loss(*arguments)
        reduced = {name: value for name, value in result.reduced.items() if name != "kl_loss"}
        return dataclasses.replace(result, reduced=reduced)

    updater.loss_function = silent
    with pytest.raises(DistillationOffError, match="kl_loss"):
        updater.update(mixed_batch(1), 0)


def test_turns_that_lose_all_tokens_leave_the_denominator(folder):
    samples = mixed_batch(1)
    updater, alone = make(folder, max_nonfinite_frac=1.0), make(folder)
    prepared = updater.preparation.prepare(samples, sequences=separate_turns(samples))
    (batch,), (reference,) = prepared.batches, prepared.reference
    reference[batch.turn_ids_BT == len(samples) - 1] = float("nan")
    updater.accumulate(prepared)
    fewer = samples[:-1]
    alone.accumulate(alone.preparation.prepare(fewer, sequences=separate_turns(fewer)))
    pairs = zip(
        updater.policy.trainable_parameters(), alone.policy.trainable_parameters(), strict=True
    )
    for one, other in pairs:
        torch.testing.assert_close(one.grad, other.grad, atol=1e-6, rtol=1e-4)


def test_an_empty_batch_takes_no_step(folder):
    updater = make(folder, max_nonfinite_frac=1.0, beta_kl=0.0)
    updater.update(mixed_batch(1), 0)
    before = weights(updater)

    def empty(batch, *settings):
        nothing = torch.full_like(batch.old_logprobs_BT, float("nan"))
        return objective_loss(dataclasses.replace(batch, old_logprobs_BT=nothing), *settings)

    updater.loss_function = empty
    report = updater.update(mixed_batch(1), 1)
    assert report.skipped is DropReason.NONFINITE_GRADIENT
    assert report.metrics["guard/empty_batch"] == 1.0
    assert report.metrics["loss"] == 0.0
    assert all(np.isnan(values).all() for values in report.advantages)
    assert largest_difference(before, weights(updater)) == 0.0


def test_incomparable_turns_do_not_dilute_the_gap_to_the_rollout_engine(folder):
    """Temperature 0 has no rollout log-prob to compare with: no gap is not a gap of zero."""
    prompts = conversation("a", [(5, 4)], seed=1), conversation("b", [(6, 4)], seed=2)
    (plain,), (other,) = prompts
    greedy = dataclasses.replace(other, temperature=0.0, distribution_modified="temperature_0")
    name = "train_rollout_logprob_abs_diff"
    alone = make(folder).update([plain], 0).metrics
    both = make(folder).update([plain, greedy], 0).metrics
    assert alone[name] > 0.1
    assert both[name] == pytest.approx(alone[name], rel=1e-4)
    assert (alone["rollout_comparable_frac"], both["rollout_comparable_frac"]) == (
        pytest.approx(1.0),
        pytest.approx(0.5),
    )
    assert np.isnan(make(folder).update([greedy], 0).metrics[name])


@pytest.mark.parametrize(
    ("gaps", "said"),
    [
        ((0, 3), "the policy has moved"),
        ((3, 0), "trainer and rollout engine are far apart"),
        ((3, 3), "the policy has moved"),
    ],
)
def test_a_moved_policy_is_told_from_an_engine_that_disagrees(folder, gaps, said):
    """The first turn's rollout log-probs are the policy's, the second's are two nats off."""
    (agreeing,), (other,) = conversation("a", [(5, 4)], seed=1), conversation("b", [(6, 4)], seed=2)
    own = own_logprobs(load(folder), torch.device("cpu"))
    turns = []
    for turn, off in ((agreeing, 0.0), (other, 2.0)):
        ids = np.concatenate([turn.prompt_ids, turn.response_ids])
        found = own(ids)[len(turn.prompt_ids) - 1 :] + np.float32(off)
        turns.append(dataclasses.replace(turn, rollout_logprobs=found))
    report = make(folder).update(turns, 0, version_gaps=gaps)
    about_kl = [line for line in report.warnings if line.startswith("rollout_corr/kl")]
    assert [said in line for line in about_kl] == [True]


def test_warmup(folder):
    updater = make(folder, warmup_steps=4, learning_rate=1e-3)
    rates = [updater.update(mixed_batch(1), step).metrics["lr"] for step in (0, 1, 3, 9)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 1e-3, 1e-3])
    assert updater.update(mixed_batch(1), 9, rate=0.5).metrics["lr"] == pytest.approx(0.5e-3)


def test_samples_with_broken_scores_name_their_reason(folder):
    updater = make(folder)
    good = sample(np.array([1], np.int32), np.array([2], np.int32))
    broken = np.array([np.nan], np.float32)
    assert updater.unusable(good) is None
    assert (
        updater.unusable(dataclasses.replace(good, teacher_logprobs=broken))
        is DropReason.TEACHER_LOGPROBS_INVALID
    )
    assert (
        updater.unusable(dataclasses.replace(good, rollout_logprobs=broken))
        is DropReason.ROLLOUT_LOGPROBS_INVALID
    )


def rates(**values: Any) -> list[float]:
    config = TrainerConfig.model_validate({"learning_rate": 1.0, **values})
    return [learning_rate_at(step, config) for step in range(config.max_steps or 6)]


def test_constant_after_the_warmup() -> None:
    assert rates(warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_ends_one_step_before_zero() -> None:
    assert rates(lr_decay_style="linear", max_steps=4) == [1.0, 0.75, 0.5, 0.25]
    assert rates(lr_decay_style="linear", max_steps=4, warmup_steps=2) == [0.5, 1.0, 1.0, 0.5]


def test_cosine() -> None:
    assert rates(lr_decay_style="cosine", max_steps=4) == pytest.approx(
        [1, 0.8535534, 0.5, 0.1464466]
    )
    falling = rates(lr_decay_style="cosine", max_steps=50, warmup_steps=5)[5:]
    assert all(before > after > 0 for before, after in pairwise(falling))


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_a_decay_needs_its_end(style: str) -> None:
    with pytest.raises(ValidationError, match="needs max_steps"):
        TrainerConfig.model_validate({"lr_decay_style": style})


def test_a_warmup_ends_before_the_run() -> None:
    with pytest.raises(ValidationError, match="less than max_steps 4"):
        TrainerConfig.model_validate({"warmup_steps": 4, "max_steps": 4})


HINT, COUNTER, KEEP = LessonKind.HINT, LessonKind.COUNTER, LessonKind.KEEP


@pytest.mark.parametrize(
    ("lessons", "gaps", "taught"),
    [
        ([None, KEEP], [0.5, 0.0], True),
        ([HINT, KEEP], [0.05, 9.0], False),
        ([HINT, COUNTER], [math.nan, 9.0], False),
        ([KEEP, KEEP], [0.05, 0.0], True),
        ([KEEP, KEEP], [0.0, 0.0], False),
        ([KEEP], [math.nan], False),
    ],
)
def test_hinted_samples_are_held_against_the_noise_and_keep_lessons_against_nothing(
    lessons: list[LessonKind | None], gaps: list[float], taught: bool
) -> None:
    samples = [SimpleNamespace(lesson=one) for one in lessons]
    totals = SimpleNamespace(
        mean_gap_of=lambda places: sum(gaps[place] for place in places) / len(places)
    )
    assert teaches(cast(list[ReadySample], samples), cast(BatchTotals, totals), 0.1) is taught
