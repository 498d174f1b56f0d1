import pytest
import torch

from tests.trainer.golden import cases, tolerance
from trainer.objectives.aggregate import token_weights, weighted_sum
from trainer.objectives.ppo import ppo_clip


@pytest.mark.parametrize("case", cases("verl091_policy_loss"))
def test_loss_gradient_and_metrics_of_verl(case):
    inputs, config, outputs = case["inputs"], case["config"], case["outputs"]
    mask = inputs["response_mask"]
    logprobs = inputs["log_prob"].requires_grad_()
    terms = ppo_clip(
        logprobs,
        inputs["old_log_prob"],
        inputs["advantages"],
        clip_low=config["clip_ratio_low"],
        clip_high=config["clip_ratio_high"],
        dual_clip=config["clip_ratio_c"],
        weights=inputs["rollout_is_weights"],
    )
    loss = weighted_sum(terms.loss, token_weights(mask, case["loss_agg_mode"]))
    loss.backward()
    bounds = tolerance(loss)
    torch.testing.assert_close(loss.detach(), outputs["loss"], **bounds)
    torch.testing.assert_close(logprobs.grad, outputs["grad_log_prob"], **bounds)
    means = token_weights(mask, "token-mean")
    metrics = {
        "actor/pg_clipfrac": weighted_sum(terms.clipped, means),
        "actor/ppo_kl": weighted_sum(terms.kl, means),
        "actor/pg_clipfrac_lower": weighted_sum(terms.clipped_lower, means),
    }
    for name, expected in outputs["metrics"].items():
        assert metrics[name].item() == pytest.approx(expected, rel=1e-4, abs=1e-4)


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
