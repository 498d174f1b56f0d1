import pytest
import torch

from tests.trainer.golden import cases
from trainer.objectives.aggregate import token_weights, weighted_sum
from trainer.objectives.policy.pure_is import pure_is


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
