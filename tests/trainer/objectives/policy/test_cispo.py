import torch

from trainer.objectives.policy.cispo import cispo

OLD = torch.full((3,), -1.0)
RATIOS = torch.tensor([6.0, 1.5, 0.1])
ADVANTAGES = torch.tensor([1.0, -1.0, 2.0])


def test_every_token_keeps_a_gradient_of_its_clipped_ratio():
    logprobs = (OLD + RATIOS.log()).requires_grad_()
    terms = cispo(logprobs, OLD, ADVANTAGES)
    terms.loss.sum().backward()
    # Above the bound of 5 the ratio is 5; there is no lower bound.
    torch.testing.assert_close(logprobs.grad, torch.tensor([-5.0, 1.5, -0.2]))
    weighted = torch.tensor([-5.0, 1.5, -0.2]) * logprobs.detach()
    torch.testing.assert_close(terms.loss.detach(), weighted)
    assert terms.clipped.tolist() == [1.0, 0.0, 0.0]


def test_narrow_clip_acts_on_both_sides_whatever_the_advantage():
    logprobs = (OLD + RATIOS.log()).requires_grad_()
    weights = torch.tensor([1.0, 1.0, 0.5], requires_grad=True)
    terms = cispo(logprobs, OLD, ADVANTAGES, clip_low=0.2, clip_high=0.28, weights=weights)
    terms.loss.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([-1.28, 1.28, -0.8]))
    assert terms.clipped.tolist() == [1.0, 1.0, 1.0]
    assert weights.grad is None


def test_extreme_ratios_stay_finite():
    terms = cispo(torch.tensor([-1e3, -0.1]), torch.tensor([-0.1, -1e3]), torch.ones(2))
    assert torch.isfinite(terms.loss).all()
    assert terms.kl.tolist() == [20.0, -20.0]
