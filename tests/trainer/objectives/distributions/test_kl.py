import pytest
import torch

from trainer.objectives.distributions.kl import k3_clamped, kl_estimate
from trainer.objectives.distributions.kl_names import canonical_kl_name, validate_kl_loss_name


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
