"""Every objective's loss and gradient per token, by numbers worked out by hand.

Two turns of three tokens. No two policies and no two temperatures agree at any token, so that a
swapped policy, a flipped sign, a swapped bound and a wrong temperature all show. The formulas are
of the sections named in options.py.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.objectives.every_objective import OBJECTIVES, random_batch
from trainer.objectives.batch import BatchStatistics, Support, TokenBatch, select_finite
from trainer.objectives.distributions.side_samples import stale_surrogate
from trainer.objectives.frame import LossSettings, objective_loss, objective_terms
from trainer.objectives.options import (
    ForwardKlTopk,
    HindsightOpd,
    OverlapTopk,
    SelfDistillation,
    SideSampleOptions,
    SparseKl,
    SupervisedOpd,
    TopkTailReverseKl,
)

# Policy over the policy before the step, at the sampling temperature; by turn, the geometric means
# are 3/2 and 1/2.
RATIOS = (2.0, 1.125, 1.5, 0.4, 0.625, 0.5)
# The same as log-ratio at temperature 1, and teacher minus the policy before the step there.
PLAIN_LOG_RATIOS = (0.1, -0.1, 0.1, 0.1, -0.1, 0.1)
ADVANTAGES = (0.4, 0.4, -0.6, 0.2, -0.4, -0.8)
# Policy before the step over the rollout engine, and the weights of rollout correction.
STALENESS = (1.0, 0.5, 2.0, 6.0, 1.0, 1.5)
WEIGHTS = (1.0, 2.0, 1.0, 1.0, 1.0, 0.5)
ZEROS = (0.0,) * 6


def row(values) -> Tensor:
    return torch.tensor([list(values)], dtype=torch.float64)


def logs(values) -> Tensor:
    return torch.log(row(values))


def everywhere(*probabilities: float) -> Tensor:
    """Log-probs [1, 6, K] of a support that is the same at each token."""
    return torch.log(torch.tensor(probabilities, dtype=torch.float64)).expand(1, 6, -1).clone()


def batch() -> TokenBatch:
    """Side samples and supports: p = (.5, .25, -), before the step (.4, .4, -), q = (.7, .2, -)."""
    old, old_sampled = torch.full_like(row(ZEROS), -1.2), torch.full_like(row(ZEROS), -2.5)
    student = everywhere(0.5, 0.25).requires_grad_()
    return TokenBatch(
        logprobs_BT=(old + row(PLAIN_LOG_RATIOS)).requires_grad_(),
        logprobs_sampled_BT=(old_sampled + logs(RATIOS)).requires_grad_(),
        old_logprobs_BT=old,
        old_logprobs_sampled_BT=old_sampled,
        reference_logprobs_BT=old + row((0.3, 0.1, -0.2, 0.0, 0.4, -0.6)),
        teacher_logprobs_BT=old + row(ADVANTAGES),
        rollout_logprobs_BT=old_sampled - logs(STALENESS),
        entropy_BT=torch.ones_like(old),
        mask_BT=torch.ones_like(old),
        turn_ids_BT=torch.tensor([[0, 0, 0, 1, 1, 1]]),
        opd_valid_BT=torch.ones_like(old),
        reward_advantages_BT=row((1.0, 1.0, -1.0, 1.0, -1.0, -1.0)),
        weights_BT=row(WEIGHTS),
        version_gap_BT=torch.full_like(old, 4.0),
        support=Support(
            ids_BTK=torch.tensor([0, 1]).expand(1, 6, -1),
            student_BTK=student,
            old_BTK=everywhere(0.4, 0.4),
            teacher_BTK=everywhere(0.7, 0.2),
            valid_BTK=torch.ones_like(student),
        ),
        statistics=BatchStatistics(gap_mean=0.1, gap_std=0.5, clip_low=0.3, clip_high=0.4),
    )


def terms(tokens: TokenBatch, options) -> tuple[Tensor, list[Tensor]]:
    """Loss per token, and its gradients: plain, sampled, support."""
    assert tokens.support is not None
    inputs = [tokens.logprobs_BT, tokens.logprobs_sampled_BT, tokens.support.student_BTK]
    loss_BT = objective_terms(select_finite(tokens)[0], options).loss_BT
    gradients = torch.autograd.grad(loss_BT.sum(), inputs, allow_unused=True)
    return loss_BT.detach(), [
        torch.zeros_like(one) if gradient is None else gradient
        for one, gradient in zip(inputs, gradients, strict=True)
    ]


def opd(surrogate: Any = "ppo", **options: Any) -> HindsightOpd:
    return HindsightOpd(surrogate=surrogate, **options)


POLICY_GRADIENTS = {
    "ppo": (opd(), (-0.512, -0.9, 0.9, -0.08, 0.32, 0.32), (0, -0.9, 0.9, -0.08, 0, 0)),
    "dual clip": (
        opd(dual_clip=1.4),
        (-0.512, -0.9, 0.84, -0.08, 0.32, 0.32),
        (0, -0.9, 0, -0.08, 0, 0),
    ),
    # A = teacher minus the policy of the step: .3, .5, -.7, .1, -.3, -.9.
    "ppo current": (
        opd(advantage_reference="current"),
        (-0.384, -1.125, 1.05, -0.04, 0.24, 0.36),
        (0, -1.125, 1.05, -0.04, 0, 0),
    ),
    "opsm": (opd(opsm_delta=0.01), (-0.512, -0.9, 0.9, -0.08, 0, 0), (0, -0.9, 0.9, -0.08, 0, 0)),
    "opsm turn": (
        opd(opsm_delta=0.01, opsm_scope="turn"),
        (-0.512, -0.9, 0.9, 0, 0, 0),
        (0, -0.9, 0.9, 0, 0, 0),
    ),
    "rewards": (
        opd(opd_coef=0.0, reward_coef=0.5),
        (-0.64, -1.125, 0.75, -0.2, 0.4, 0.2),
        (0, -1.125, 0.75, -0.2, 0, 0),
    ),
    "unclipped": (
        opd("unclipped"),
        (-0.8, -0.9, 0.9, -0.08, 0.25, 0.2),
        (-0.8, -0.9, 0.9, -0.08, 0.25, 0.2),
    ),
    "cispo": (opd("cispo"), None, (-0.512, -0.9, 0.768, -0.16, 0.32, 0.32)),
    "gspo": (opd("gspo"), (-0.512, -1.024, 0.9, -0.1, 0.32, 0.32), (0, 0, 0.9, -0.1, 0, 0)),
    "gspo sequence": (
        opd("gspo_sequence"),
        (-0.512, -1.024, 0.9, -0.1, 0.32, 0.32),
        (0.3, 0.3, 0.3, -0.1 / 3, -0.1 / 3, -0.1 / 3),
    ),
    "pure_is": (opd("pure_is"), None, (-0.4, -0.8, 0.6, -0.2, 0.4, 0.4)),
    # A = (gap - .1) / .5
    "normalised": (opd("pure_is", normalise=True), None, (-0.6, -1.2, 1.4, -0.2, 1.0, 0.9)),
    # A weight of 6 is above the cap of 5.
    "decoupled": (
        opd("decoupled"),
        (-0.512, -0.225, 1.8, 0, 0.32, 0.96),
        (0, -0.225, 1.8, 0, 0, 0),
    ),
    # Ratio (r b)^(1/4) and weight (r b)^(3/4), for a version gap of 4 and b = STALENESS.
    "a3po": (
        opd("a3po", clip_low=0.1, clip_high=0.2),
        (-0.8, -0.225, 1.8, -0.24 * 2.4**0.75, 0.36 * 0.625**0.75, 0.6),
        (-0.8, -0.225, 1.8, 0, 0, 0.6),
    ),
    "m2po": (opd("m2po"), (-0.56, -0.9, 0.9, -0.08, 0.28, 0.28), (0, -0.9, 0.9, -0.08, 0, 0)),
}


@pytest.mark.parametrize("surrogate", ["decoupled", "a3po"])
@pytest.mark.parametrize("gap", [0.0, 1.0, 4.0])
def test_a_token_that_cannot_be_compared_has_weight_1_and_is_clipped(surrogate, gap):
    """As in PPO; its clip is around the policy before the step."""
    tokens = batch()
    lost = replace(
        tokens,
        rollout_logprobs_BT=torch.full_like(tokens.rollout_logprobs_BT, math.nan),
        version_gap_BT=torch.full_like(tokens.version_gap_BT, gap),
    )
    unweighted = replace(tokens, weights_BT=torch.ones_like(tokens.weights_BT))
    loss, (_, gradient, _) = terms(lost, opd(surrogate))
    expected, (_, wanted, _) = terms(unweighted, opd())
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("name", POLICY_GRADIENTS)
def test_policy_gradients(name):
    options, loss, gradient = POLICY_GRADIENTS[name]
    found, (plain, sampled, support) = terms(batch(), options)
    if loss is None:
        # The value of these is the gradient's factor times the log-prob.
        loss = (row(gradient) * (-2.5 + logs(RATIOS)))[0].tolist()
    torch.testing.assert_close(found, row(loss))
    torch.testing.assert_close(sampled, row(gradient))
    assert not plain.any()
    assert not support.any()


# Student minus teacher at temperature 1.
GAPS = (-0.3, -0.5, 0.7, -0.1, 0.3, 0.9)
K2 = (0.045, 0.125, 0.245, 0.005, 0.045, 0.405)
ESTIMATORS = {
    "k2": ({"estimator": "k2"}, K2, GAPS),
    "k3": (
        {"estimator": "k3"},
        (0.0498588, 0.1487213, 0.1965853, 0.0051709, 0.0408182, 0.3065697),
        (-0.3498588, -0.6487213, 0.5034147, -0.1051709, 0.2591818, 0.5934303),
    ),
    "k1+": ({"estimator": "k1+"}, GAPS, GAPS),
    "clamped": (
        {"estimator": "k2", "loss_max_clamp": 0.1},
        (0.045, 0.1, 0.1, 0.005, 0.045, 0.1),
        (-0.3, 0, 0, -0.1, 0.3, 0),
    ),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators(name):
    options, loss, gradient = ESTIMATORS[name]
    found, (plain, sampled, _) = terms(batch(), SupervisedOpd(name="supervised_opd", **options))
    torch.testing.assert_close(found, row(loss), atol=1e-7, rtol=0)
    torch.testing.assert_close(plain, row(gradient), atol=1e-7, rtol=0)
    assert not sampled.any()


def sides(**options) -> SideSampleOptions:
    return SideSampleOptions(name="side_samples", samples=2, **options)


def sparse(**options) -> SparseKl:
    return SparseKl(name="sparse_kl", topk=2, **options)


# Loss and gradient of one token before weights; None: the gradient is another test's.
SUPPORTS = {
    # .7 log 1.4 + .2 log .8
    "forward": (ForwardKlTopk(name="forward_kl_topk", topk=2), 0.1909019, (-0.7, -0.2)),
    "forward capped": (
        ForwardKlTopk(name="forward_kl_topk", topk=2, loss_max_clamp=0.1),
        0.1,
        (0, 0),
    ),
    # The teacher's .2 is raised to e^-1.5.
    "forward clamped": (
        ForwardKlTopk(name="forward_kl_topk", topk=2, log_prob_min_clamp=-1.5),
        0.2355306 - 0.2231302 * 0.1137056,
        (-0.7, -0.2231302),
    ),
    # With the rest: .25 log 2.5
    "tail": (
        TopkTailReverseKl(name="topk_tail_reverse_kl", topk=2),
        0.1166225,
        (-0.6263815, -0.1732868),
    ),
    # w = (.5, .5), A = w (log 1.75, -.6), ratios (1.25, .625); the second is clipped to .8.
    "overlap": (
        OverlapTopk(name="overlap_topk", topk=2, difference_clip=0.6),
        -0.3497599 + 0.24,
        (-0.3497599, 0),
    ),
    # -mean(rho A), A = (log 1.4, log .8)
    "side": (sides(), -0.1405628, (-0.2102951, 0.0697324)),
    "side without ratio": (sides(importance=False), -0.0566643, (-0.1682361, 0.1115718)),
    # A = (log 1.75, -log 2)
    "side old": (sides(advantage_reference="old"), -0.1331514, (-0.3497599, 0.2166085)),
    "side clipped": (sides(advantage_reference="old", clip=0.2), -0.0585106, (0, 0)),
    "reverse": (sparse(), -0.1124502, (0.3317639, 0.3057859)),
    "sparse forward": (sparse(direction="forward"), 0.1909019, (-0.7, -0.2)),
    "skewed": (sparse(direction="skewed"), 0.0392258, (-0.1841181, 0.052893)),
    # With the rest, as "tail" and "forward" with .1 log .4 more.
    "skewed tail": (
        sparse(direction="skewed", tail=True),
        0.5 * 0.1166225 + 0.5 * (0.1909019 - 0.0916291),
        (-0.5631908, -0.1366434),
    ),
    "skewed clipped": (sparse(direction="skewed", token_clip=0.02), 0.0255786, (0, 0.052893)),
    # w = (.5, .5), A = w (log 1.75, -log 2), both outside the clip of .2
    "sparse pg": (sparse(direction="policy_gradient"), -0.0585106, (0, 0)),
    # Of all three tokens: .25 on either side's rest against .1.
    "jsd": (
        SelfDistillation(name="self_distillation", topk=2, is_clip=None),
        0.0263677,
        (-0.1347491, -0.0314143),
    ),
}


@pytest.mark.parametrize("name", SUPPORTS)
def test_supports(name):
    options, loss, gradient = SUPPORTS[name]
    weights = row(WEIGHTS if name == "jsd" else (1.0,) * 6)
    found, (plain, sampled, support) = terms(batch(), options)
    torch.testing.assert_close(found, loss * weights, atol=1e-7, rtol=0)
    expected = weights.unsqueeze(-1) * torch.tensor(gradient, dtype=torch.float64)
    torch.testing.assert_close(support, expected, atol=1e-7, rtol=0)
    assert not plain.any()
    assert not sampled.any()


def test_the_two_clips_of_side_samples_are_not_each_others():
    """Ratios 1.25 and .625; a half below, a tenth above: -1.1 log 1.75 and .625 log 2."""
    support = batch().support
    assert support is not None
    found = stale_surrogate(
        support.student_BTK,
        support.old_BTK,
        support.teacher_BTK,
        advantage_reference="old",
        clip_low=0.5,
        clip_high=0.1,
    )
    expected = torch.tensor([-1.1 * math.log(1.75), 0.625 * math.log(2.0)], dtype=torch.float64)
    torch.testing.assert_close(found.loss, expected.expand(1, 6, -1))


@pytest.mark.parametrize(("is_clip", "factors"), [(2.0, (1.5, 0.5)), (1.2, (1.2, 0.5))])
def test_the_weight_of_a_divergence_is_capped_and_detached(is_clip, factors):
    """The policy over the one before the step, the same at either temperature."""
    tokens = batch()
    moved = logs((1.5, 1.5, 1.5, 0.5, 0.5, 0.5))
    inputs = [(old + moved).requires_grad_() for old in (row((-1.2,) * 6), row((-2.5,) * 6))]
    tokens = replace(tokens, logprobs_BT=inputs[0], logprobs_sampled_BT=inputs[1])
    options = SelfDistillation(name="self_distillation", topk=2, is_clip=is_clip)
    found, (plain, sampled, support) = terms(tokens, options)
    weights = row((factors[0],) * 3 + (factors[1],) * 3) * row(WEIGHTS)
    torch.testing.assert_close(found, 0.0263677 * weights, atol=1e-7, rtol=0)
    expected = weights.unsqueeze(-1) * torch.tensor([-0.1347491, -0.0314143]).double()
    torch.testing.assert_close(support, expected, atol=1e-7, rtol=0)
    assert not plain.any()
    assert not sampled.any()


@pytest.mark.parametrize("alpha", [0.0, 0.25, 1.0])
def test_alpha_is_the_share_of_the_teacher(alpha):
    options = SelfDistillation(name="self_distillation", topk=2, alpha=alpha, is_clip=None)
    found, _ = terms(replace(batch(), weights_BT=torch.ones(1, 6, dtype=torch.float64)), options)
    p, q = (0.5, 0.25, 0.25), (0.7, 0.2, 0.1)
    mixed = [(1 - alpha) * a + alpha * b for a, b in zip(p, q, strict=True)]
    from_p, from_q = (
        sum(a * math.log(a / b) for a, b in zip(side, mixed, strict=True)) for side in (p, q)
    )
    ends = {0.0: 0.0992728, 1.0: 0.1166225}
    expected = ends[alpha] if alpha in ends else (1 - alpha) * from_p + alpha * from_q
    torch.testing.assert_close(found, torch.full_like(found, expected), atol=1e-7, rtol=0)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_nothing_but_the_student_gets_a_gradient(name):
    """Weights, the rollout engine's log-probs and teachers are data, whatever graph they bring."""
    tokens = random_batch(6)
    assert tokens.support is not None
    fields = ["weights_BT", "rollout_logprobs_BT", "version_gap_BT"]
    if not name.startswith("supervised"):
        fields.append("teacher_logprobs_BT")
    data = {field: getattr(tokens, field).clone().requires_grad_() for field in fields}
    teacher = tokens.support.teacher_BTK.clone().requires_grad_()
    support = replace(tokens.support, teacher_BTK=teacher)
    tokens = replace(tokens, support=support, **data)
    student = [tokens.logprobs_BT, tokens.logprobs_sampled_BT, support.student_BTK]
    for one in student:
        one.requires_grad_()
    result = objective_loss(tokens, OBJECTIVES[name], LossSettings(beta_kl=0.0))
    others = torch.autograd.grad(result.loss, [*data.values(), teacher], allow_unused=True)
    for gradient in others:
        assert gradient is None or not gradient.any()


# beta_kl .5 with k2, beta_entropy .1; each token weighs 1/6.
FRAME = LossSettings(beta_kl=0.5, kl_type="k2", beta_entropy=0.1)


def test_the_kl_to_the_start_is_at_temperature_1():
    """Policy minus start: -.2, -.2, .3, .1, -.5, .7."""
    tokens = batch()
    result = objective_loss(tokens, opd("pure_is"), FRAME)
    assert float(result.reduced["kl_loss"]) == pytest.approx(0.46 / 6)
    weighted = row((-0.4, -0.8, 0.6, -0.2, 0.4, 0.4)) * (-2.5 + logs(RATIOS))
    expected = float(weighted.sum()) / 6 + 0.5 * 0.46 / 6 - 0.1
    assert float(result.loss.detach()) == pytest.approx(expected)
    (plain,) = torch.autograd.grad(result.loss, [tokens.logprobs_BT])
    torch.testing.assert_close(plain, 0.5 * row((-0.2, -0.2, 0.3, 0.1, -0.5, 0.7)) / 6)


def test_rewards_beside_a_divergence_are_clipped_at_the_sampling_temperature():
    tokens = batch()
    options = OverlapTopk(name="overlap_topk", topk=2, difference_clip=0.6, reward_coef=0.5)
    result = objective_loss(tokens, options, LossSettings(beta_kl=0.0))
    # Ratios 2, 1.125, 1.5, .4, .625, .5 with advantages of 1, 1, -1, 1, -1, -1.
    reward = (-1.28 - 2.25 + 1.5 - 0.4 + 0.8 + 0.4) / 6
    assert float(result.reduced["reward_pg_loss"]) == pytest.approx(reward)
    assert float(result.loss.detach()) == pytest.approx(-0.1097599 + 0.5 * reward, abs=1e-7)
    (sampled,) = torch.autograd.grad(result.loss, [tokens.logprobs_sampled_BT])
    torch.testing.assert_close(sampled, 0.5 * row((0, -2.25, 1.5, -0.4, 0, 0)) / 6)


def test_reports_of_the_gap_are_at_temperature_1():
    result = objective_loss(batch(), SUPPORTS["tail"][0], LossSettings(beta_kl=0.0))
    torch.testing.assert_close(result.advantages_BT, row(ADVANTAGES))
    tokens = batch()
    result = objective_loss(tokens, opd(), LossSettings(beta_kl=0.0))
    torch.testing.assert_close(result.advantages_BT, row(ADVANTAGES))
    assert float(result.token_max["ratio_max"]) == pytest.approx(2.0)
    gap = sum(abs(math.log(one)) for one in STALENESS) / 6
    assert float(result.reduced["train_rollout_logprob_abs_diff"]) == pytest.approx(gap)
