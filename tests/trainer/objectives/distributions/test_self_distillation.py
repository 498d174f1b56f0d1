import math

import pytest
import torch

from trainer.objectives.batch import token_weights, weighted_sum
from trainer.objectives.distributions.self_distillation import (
    clipped_weights,
    self_distillation_divergence,
)

STUDENT = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log()
TEACHER = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("size", "alpha", "rest", "expected"),
    [
        (3, 0.5, "renormalise", 0.0263677),
        (2, 1.0, "renormalise", 0.0323879),
        (2, 1.0, "tail", 0.1166225),
        (2, 0.0, "tail", 0.0992728),
        (1, 1.0, "tail", 0.0871767),
    ],
)
def test_worked_numbers(size, alpha, rest, expected):
    value = self_distillation_divergence(
        STUDENT[:, :size], TEACHER[:, :size], alpha=alpha, rest=rest
    )
    assert value.item() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("rest", ["tail", "renormalise"])
def test_equal_sides_have_no_divergence_and_no_gradient(alpha, rest):
    logits = STUDENT.clone().requires_grad_()
    student = torch.log_softmax(logits, dim=-1)
    value = self_distillation_divergence(student, STUDENT, alpha=alpha, rest=rest)
    value.sum().backward()
    assert value.item() == pytest.approx(0.0, abs=1e-9)
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, torch.zeros_like(logits), atol=1e-7, rtol=0)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_a_padded_vocabulary_changes_nothing(alpha):
    padding = torch.full((1, 2), -torch.inf, dtype=torch.float64)
    plain = STUDENT.clone().requires_grad_()
    padded = torch.cat([STUDENT, padding], dim=-1).requires_grad_()
    teacher = torch.cat([TEACHER, padding], dim=-1)
    first = self_distillation_divergence(plain, TEACHER, alpha=alpha, rest="renormalise")
    second = self_distillation_divergence(padded, teacher, alpha=alpha, rest="renormalise")
    torch.testing.assert_close(first, second)
    (first.sum() + second.sum()).backward()
    assert plain.grad is not None
    assert padded.grad is not None
    torch.testing.assert_close(padded.grad[:, :3], plain.grad)
    assert padded.grad[:, 3:].tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("rest", ["tail", "renormalise"])
def test_garbage_at_mask_0_reaches_no_gradient(alpha, rest):
    student = torch.stack([STUDENT, torch.full_like(STUDENT, torch.nan)], dim=1).requires_grad_()
    teacher = torch.stack([TEACHER, torch.full_like(TEACHER, torch.inf)], dim=1)
    mask = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    divergence = self_distillation_divergence(
        student, teacher, alpha=alpha, rest=rest, valid=mask.unsqueeze(-1)
    )
    loss = weighted_sum(divergence, token_weights(mask, "token-mean"))
    loss.backward()
    assert torch.isfinite(loss)
    assert student.grad is not None
    assert torch.isfinite(student.grad).all()
    assert student.grad[0, 1].tolist() == [0.0, 0.0, 0.0]


def test_the_weight_is_capped_detached_and_finite():
    logprobs = torch.tensor([-1.0, -1.0, -100.0], requires_grad=True)
    terms = clipped_weights(logprobs, torch.tensor([-1.5, -3.0, -1.0]), is_clip=2.0)
    assert terms.weights.tolist() == pytest.approx([math.exp(0.5), 2.0, math.exp(-20)])
    assert terms.capped.tolist() == [0.0, 1.0, 0.0]
    assert not terms.weights.requires_grad


def test_bad_input():
    with pytest.raises(ValueError, match="alpha"):
        self_distillation_divergence(STUDENT, TEACHER, alpha=1.5, rest="renormalise")
    with pytest.raises(ValueError, match="unknown rest"):
        self_distillation_divergence(STUDENT, TEACHER, alpha=1.0, rest="tails")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one shape"):
        self_distillation_divergence(STUDENT, TEACHER[:, :2], alpha=1.0, rest="renormalise")
    with pytest.raises(ValueError, match="is_clip"):
        clipped_weights(torch.zeros(1), torch.zeros(1), is_clip=0.0)
