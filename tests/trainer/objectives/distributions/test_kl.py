import pytest
import torch

from trainer.objectives.distributions.kl import (
    at_least_float32,
    k3_clamped,
    kl_estimate,
    kl_with_ratio,
)
from trainer.objectives.names import canonical_kl_name, validate_kl_loss_name


def test_worked_numbers():
    logprobs = torch.tensor([-0.5, -1.0, -3.0], requires_grad=True)
    other = torch.tensor([-0.7, -0.2, -0.01])
    k3 = kl_estimate("low_var_kl", logprobs, other)
    k3.sum().backward()
    torch.testing.assert_close(
        k3.detach(), torch.tensor([0.018731, 0.425541, 10.0]), atol=1e-6, rtol=0
    )
    torch.testing.assert_close(
        logprobs.grad, torch.tensor([0.181269, -1.225541, 0.0]), atol=1e-6, rtol=0
    )
    assert k3_clamped(logprobs.detach(), other).tolist() == [0.0, 0.0, 1.0]


def test_straight_through_has_the_gradient_of_k2_where_k3_has_none():
    logprobs = torch.tensor([-3.0], requires_grad=True)
    value = kl_estimate("k3+", logprobs, torch.tensor([-0.01]))
    value.sum().backward()
    assert value.item() == pytest.approx(10.0)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(-2.99)


@pytest.mark.parametrize("name", ["k1", "kl"])
def test_k1_is_refused_as_a_loss_under_both_names(name):
    with pytest.raises(ValueError, match="ignores the reference"):
        validate_kl_loss_name(name)
    validate_kl_loss_name(name + "+")


def test_unknown_name():
    with pytest.raises(ValueError, match="k4"):
        canonical_kl_name("k4")


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_narrow_types_are_computed_in_float32(dtype):
    wanted = torch.float64 if dtype == torch.float64 else torch.float32
    assert at_least_float32(torch.zeros(1, dtype=dtype)).dtype == wanted
