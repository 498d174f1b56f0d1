"""What holds for every objective: gradients, masks, micro-batches, a teacher like the student."""

import math
from dataclasses import replace

import pytest
import torch

from tests.trainer.objectives.every_objective import (
    DETACHED_PARTS,
    OBJECTIVES,
    REWARDED,
    leaves,
    random_batch,
    rows,
    with_leaves,
)
from trainer.objectives.batch import GlobalCounts
from trainer.objectives.frame import LossSettings, expected_means, objective_loss
from trainer.objectives.names import AggregationMode

SETTINGS = LossSettings(beta_kl=0.3, kl_type="k2", beta_entropy=0.1)
PLAIN = LossSettings(beta_kl=0.0)
AGGREGATIONS = AggregationMode.__args__
every_objective = pytest.mark.parametrize("name", OBJECTIVES)


def gradients(batch, options, settings, counts=None):
    fresh, inputs = leaves(batch)
    result = objective_loss(fresh, options, settings, counts)
    found = torch.autograd.grad(result.loss, inputs, allow_unused=True)
    return result, [
        torch.zeros_like(i) if g is None else g for i, g in zip(inputs, found, strict=True)
    ]


@pytest.mark.parametrize("name", sorted(OBJECTIVES.keys() - DETACHED_PARTS))
def test_gradients_are_those_of_finite_differences(name):
    batch = random_batch(3)
    _, analytic = gradients(batch, OBJECTIVES[name], SETTINGS)
    _, inputs = leaves(batch)
    step = 1e-6
    for which, gradient in enumerate(analytic):
        for index in range(gradient.numel()):
            values = []
            for sign in (1, -1):
                moved = [tensor.detach().clone() for tensor in inputs]
                moved[which].view(-1)[index] += sign * step
                loss = objective_loss(with_leaves(batch, moved), OBJECTIVES[name], SETTINGS).loss
                values.append(float(loss))
            numeric = (values[0] - values[1]) / (2 * step)
            assert float(gradient.view(-1)[index]) == pytest.approx(numeric, abs=2e-7), (
                which,
                index,
            )


def test_gradients_of_what_is_detached():
    """By hand, at the tokens of one turn: weights 1/2 each, a turn mean over one turn."""
    batch = rows(random_batch(3), [2])
    batch = replace(batch, weights_BT=torch.full_like(batch.weights_BT, 1.5))
    use = batch.mask_BT > 0
    now, old = batch.logprobs_sampled_BT[use], batch.old_logprobs_sampled_BT[use]
    gap = (batch.teacher_logprobs_BT - batch.old_logprobs_BT)[use]
    ratio = torch.exp(now - old)
    expected = {
        "cispo": -ratio.clamp(0.0, 1.3) * gap * 1.5,
        "pure_is": -gap * 1.5,
        "unclipped": -ratio * gap * 1.5,
    }
    for name, values in expected.items():
        _, found = gradients(batch, OBJECTIVES[name], PLAIN)
        torch.testing.assert_close(found[1][use], values / 2)
    current = (batch.teacher_logprobs_BT - batch.logprobs_BT)[use]
    inside = ((ratio > 0.8) | (current > 0)) & ((ratio < 1.28) | (current < 0))
    _, found = gradients(batch, OBJECTIVES["ppo_current"], PLAIN)
    torch.testing.assert_close(found[1][use], torch.where(inside, -ratio * current * 0.75, 0.0))
    support = batch.support
    student, teacher = support.student_BTK[use], support.teacher_BTK[use]
    side = torch.exp(student - support.old_BTK[use])
    for name, rho in (("side_samples", side), ("side_samples_no_is", torch.ones_like(side))):
        _, found = gradients(batch, OBJECTIVES[name], PLAIN)
        torch.testing.assert_close(found[3][use], -rho * (teacher - student) / 3 / 2)


@every_objective
def test_what_is_masked_changes_nothing(name):
    clean = random_batch(1)
    dirty = {}
    for field in type(clean).__dataclass_fields__:
        value = getattr(clean, field)
        if not isinstance(value, torch.Tensor) or field in ("mask_BT", "turn_ids_BT"):
            continue
        garbage = torch.tensor([math.nan, math.inf, -math.inf, 1e30], dtype=value.dtype)
        fill = garbage[torch.arange(value.numel()) % 4].view_as(value)
        dirty[field] = torch.where(clean.mask_BT > 0, value, fill)
    support = {}
    for field in ("student_BTK", "old_BTK", "teacher_BTK"):
        value = getattr(clean.support, field)
        used = (clean.mask_BT.unsqueeze(-1) > 0) & (clean.support.valid_BTK > 0)
        support[field] = torch.where(used, value, torch.full_like(value, math.nan))
    spoiled = replace(clean, **dirty, support=replace(clean.support, **support))
    one, expected = gradients(clean, OBJECTIVES[name], SETTINGS)
    other, found = gradients(spoiled, OBJECTIVES[name], SETTINGS)
    assert torch.equal(one.loss, other.loss)
    for key, value in one.reduced.items():
        assert torch.equal(value, other.reduced[key]), key
    for key in one.token_sums:
        assert torch.equal(one.token_sums[key], other.token_sums[key]), key
    for mine, theirs in zip(expected, found, strict=True):
        assert torch.equal(mine, theirs)
        assert bool(torch.isfinite(theirs).all())


@every_objective
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_micro_batches_add_up(name, aggregation):
    batch = random_batch(2)
    settings = replace(SETTINGS, aggregation=aggregation, horizon=8)
    counts = GlobalCounts.of(batch.mask_BT, batch.turn_ids_BT)
    whole, expected = gradients(batch, OBJECTIVES[name], settings, counts)
    parts = [[1], [0, 2], [3]]
    total = 0.0
    for part in parts:
        result, found = gradients(rows(batch, part), OBJECTIVES[name], settings, counts)
        total = total + result.loss.detach()
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs[part], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(total, whole.loss.detach(), rtol=1e-9, atol=1e-12)


# A clamp of log-probs from below moves student and teacher alike and leaves a gradient on the rest.
@pytest.mark.parametrize("name", sorted(OBJECTIVES.keys() - {"forward_kl_clamped"}))
def test_a_teacher_that_is_the_student_teaches_nothing(name):
    """A support of the whole vocabulary: on a part of it a KL without tail has a gradient left."""
    batch = random_batch(4)
    logits = torch.randn_like(batch.support.student_BTK).requires_grad_()
    logprobs = torch.log_softmax(logits, dim=-1)
    support = replace(batch.support, student_BTK=logprobs, valid_BTK=torch.ones_like(logits))
    token = batch.logprobs_BT.clone().requires_grad_()
    same = replace(
        batch,
        logprobs_BT=token,
        logprobs_sampled_BT=token,
        teacher_logprobs_BT=batch.logprobs_BT,
        old_logprobs_BT=batch.logprobs_BT,
        reward_advantages_BT=torch.zeros_like(batch.logprobs_BT),
        support=replace(support, teacher_BTK=logprobs.detach(), old_BTK=logprobs.detach()),
        statistics=replace(batch.statistics, gap_mean=0.0),
    )
    result = objective_loss(same, OBJECTIVES[name], PLAIN)
    assert float(result.loss.detach()) == pytest.approx(0.0, abs=1e-12)
    for gradient in torch.autograd.grad(result.loss, [token, logits], allow_unused=True):
        assert gradient is None or float(gradient.abs().max()) < 1e-12


@every_objective
def test_an_empty_mask_gives_a_differentiable_zero(name):
    batch = random_batch(5)
    empty = replace(
        batch,
        mask_BT=torch.zeros_like(batch.mask_BT),
        turn_ids_BT=torch.full_like(batch.turn_ids_BT, -1),
    )
    result, found = gradients(empty, OBJECTIVES[name], SETTINGS)
    assert float(result.loss.detach()) == 0.0
    assert result.loss.requires_grad
    assert all(float(gradient.abs().max()) == 0 for gradient in found)


@every_objective
def test_promised_metrics_are_reported(name):
    result = objective_loss(random_batch(), OBJECTIVES[name], SETTINGS)
    assert expected_means(OBJECTIVES[name]) <= result.reduced.keys()
    assert {"loss", "opd/kl_loss", "kl_loss", "entropy_loss"} <= result.reduced.keys()


@every_objective
def test_a_turn_without_teacher_is_not_distilled(name):
    batch = random_batch(11)
    untaught = (batch.turn_ids_BT == 2).to(batch.mask_BT.dtype)
    nan = torch.full_like(batch.teacher_logprobs_BT, math.nan)
    absent = replace(
        batch,
        opd_valid_BT=batch.mask_BT * (1 - untaught),
        teacher_logprobs_BT=torch.where(untaught > 0, nan, batch.teacher_logprobs_BT),
        reward_advantages_BT=torch.zeros_like(batch.mask_BT),
    )
    _, found = gradients(absent, OBJECTIVES[name], PLAIN)
    for gradient in found:
        assert bool(torch.isfinite(gradient).all())
        assert float(gradient[1].abs().max()) == 0.0
    if name != "rewards_alone":
        assert any(float(gradient.abs().max()) > 0 for gradient in found)


@pytest.mark.parametrize("name", sorted(REWARDED))
def test_rewards_act_without_a_teacher(name):
    batch = random_batch(7)
    nan = torch.full_like(batch.teacher_logprobs_BT, math.nan)
    alone = replace(batch, opd_valid_BT=torch.zeros_like(batch.mask_BT), teacher_logprobs_BT=nan)
    _, found = gradients(alone, OBJECTIVES[name], PLAIN)
    assert float(found[1].abs().max()) > 0
    assert float(found[3].abs().max()) == 0.0


@every_objective
def test_a_nonfinite_value_of_the_trainer_drops_its_token(name):
    batch = random_batch(8)
    spoiled = batch.logprobs_sampled_BT.clone()
    spoiled[1, 3] = math.nan
    result, found = gradients(
        replace(batch, logprobs_sampled_BT=spoiled), OBJECTIVES[name], SETTINGS
    )
    assert int(result.token_sums["nonfinite"]) == 1
    assert float(result.mask_BT[1, 3]) == 0.0
    assert all(bool(torch.isfinite(gradient).all()) for gradient in found)


def test_a_nonfinite_value_of_the_teacher_is_refused():
    batch = random_batch(9)
    batch.teacher_logprobs_BT[1, 3] = math.nan
    with pytest.raises(ValueError, match="teacher log-prob"):
        objective_loss(batch, OBJECTIVES["ppo"], PLAIN)
