import pytest
import torch

from tests.trainer.golden import cases
from trainer.objectives.batch import token_weights, weighted_sum
from trainer.objectives.distributions.kl import comparable_ratio
from trainer.objectives.policy.decoupled import composed_weights
from trainer.objectives.policy.ppo import ppo_clip, pure_is


def test_worked_numbers():
    old = torch.full((8,), -1.0, dtype=torch.float64)
    ratios = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.28, 1.29, 0.8, 0.79], dtype=torch.float64)
    advantages = torch.tensor([1, -1, 1, -1, 1, 1, -1, -1], dtype=torch.float64)
    logprobs = (old + ratios.log()).requires_grad_()
    # The bounds themselves are left out of the gradient check: 1.28 and 0.8 fall on either side.
    terms = ppo_clip(logprobs, old, advantages, clip_low=0.2, clip_high=0.28)
    terms.loss.sum().backward()
    expected = torch.tensor([-1.28, 1.5, -0.5, 0.8, -1.28, -1.28, 0.8, 0.8], dtype=torch.float64)
    torch.testing.assert_close(terms.loss.detach(), expected)
    assert logprobs.grad is not None
    inner = [0, 1, 2, 3, 5, 7]
    torch.testing.assert_close(
        logprobs.grad[inner], torch.tensor([0, 1.5, -0.5, 0, 0, 0], dtype=torch.float64)
    )


def test_extreme_ratios_stay_finite():
    terms = ppo_clip(
        torch.tensor([99.0, -101.0]),
        torch.tensor([-1.0, -1.0]),
        torch.tensor([-1.0, 1.0]),
        clip_low=0.2,
        clip_high=0.28,
    )
    assert torch.isfinite(terms.loss).all()
    assert terms.ratio[0].item() == pytest.approx(4.851652e8, rel=1e-5)


def test_dual_clip_must_exceed_one():
    zeros = torch.zeros(1)
    with pytest.raises(ValueError, match="dual_clip"):
        ppo_clip(zeros, zeros, zeros, clip_low=0.2, clip_high=0.2, dual_clip=1.0)


def test_weights_multiply_after_the_clip_and_are_detached():
    logprobs = torch.tensor([-0.5, -1.2], requires_grad=True)
    weights = torch.tensor([2.0, 0.5], requires_grad=True)
    terms = ppo_clip(
        logprobs,
        torch.tensor([-1.0, -1.0]),
        torch.tensor([1.0, 1.0]),
        clip_low=0.2,
        clip_high=0.28,
        weights=weights,
    )
    terms.loss.sum().backward()
    ratio = torch.tensor(-0.2).exp().item()
    torch.testing.assert_close(terms.loss.detach(), torch.tensor([-2.56, -0.5 * ratio]))
    torch.testing.assert_close(logprobs.grad, torch.tensor([0.0, -0.5 * ratio]))
    assert weights.grad is None


TRAIN = torch.log(torch.tensor([0.4, 0.4, 0.4, 0.4]))
ROLLOUT = torch.log(torch.tensor([0.4, 0.1, 0.9, float("nan")]))


def test_ratio_of_trainer_over_rollout_engine():
    ratio = comparable_ratio(TRAIN, ROLLOUT)
    torch.testing.assert_close(ratio, torch.tensor([1.0, 4.0, 4 / 9, 1.0]))


def test_a_token_that_cannot_be_compared_weighs_one_whatever_the_cap():
    assert composed_weights(ROLLOUT, TRAIN, TRAIN, engine_cap=0.5)[3].item() == 1.0


def test_the_weight_has_no_gradient():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    weights = (logprobs - torch.tensor([-1.5, -1.5])).exp()
    loss = pure_is(logprobs, torch.tensor([2.0, -1.0]), weights)
    loss.sum().backward()
    values = weights.detach()
    torch.testing.assert_close(loss.detach(), torch.tensor([2.0, -2.0]) * values)
    torch.testing.assert_close(logprobs.grad, torch.tensor([-2.0, 1.0]) * values)
    torch.testing.assert_close(pure_is(logprobs, torch.ones(2)), -logprobs)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_gradient_is_not_that_of_weights_with_gradient(level):
    every = [parameter.values[0] for parameter in cases("seed_pure_is_loss_418f")]
    for case in (case for case in every if case["kwargs"] == {"rollout_is": level}):
        inputs, outputs = case["inputs"], case["outputs"]
        leaf = inputs["log_prob"].requires_grad_()
        aggregation = token_weights(inputs["response_mask"], case["loss_agg_mode"])
        terms = pure_is(leaf, inputs["advantages"], outputs["is_weights"])
        (grad,) = torch.autograd.grad(weighted_sum(terms, aggregation), leaf)
        torch.testing.assert_close(grad, outputs["grad_log_prob_detached_weights"])
        shipped = outputs["grad_log_prob_as_shipped_nondetached"]
        assert not torch.allclose(grad, shipped, atol=1e-3)
