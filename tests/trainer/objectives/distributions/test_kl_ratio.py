import pytest
import torch

from trainer.objectives.distributions.kl_ratio import kl_with_ratio


def test_the_smaller_of_both_products():
    old = torch.full((4,), -1.0)
    logprobs = (old + torch.tensor([1.5, 1.1, 0.5, 1.0]).log()).requires_grad_()
    kl = torch.tensor([2.0, 2.0, 2.0, -2.0])
    value = kl_with_ratio(kl, logprobs, old)
    torch.testing.assert_close(value.detach(), torch.tensor([2.4, 2.2, 1.0, -2.0]))
    value.sum().backward()
    # Clipped from above the ratio has no gradient; the product below the lower bound is smaller.
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad[:3], torch.tensor([0.0, 2.2, 1.0]))


def test_gradient_goes_through_the_ratio_and_the_kl():
    logprobs = torch.tensor([-0.95], requires_grad=True)
    other, old = torch.tensor([-1.2]), torch.tensor([-1.0])
    kl = 0.5 * (logprobs - other).square()
    (grad,) = torch.autograd.grad(kl_with_ratio(kl, logprobs, old).sum(), logprobs)
    ratio = torch.tensor(0.05).exp().item()
    assert grad.item() == pytest.approx(ratio * (0.25 + 0.5 * 0.25**2), rel=1e-5)


def test_extreme_ratios_stay_finite():
    old, new = torch.tensor([-1e3, 0.0]), torch.tensor([0.0, -1e3])
    assert torch.isfinite(kl_with_ratio(torch.tensor([1.0, 1.0]), new, old)).all()
