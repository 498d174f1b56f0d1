import math

import pytest
import torch

from tests.trainer.live import support_logprobs
from trainer.objectives.distributions.kl import (
    comparable,
    kl_terms,
    tail_logprob,
    topk_tail_reverse_kl,
)

STUDENT = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log()
TEACHER = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64).log()


@pytest.mark.parametrize(("size", "expected"), [(1, 0.0871767), (2, 0.1166225)])
def test_worked_numbers(size, expected):
    terms = topk_tail_reverse_kl(STUDENT[:, :size], TEACHER[:, :size])
    assert terms.kl.item() == pytest.approx(expected, abs=1e-7)


def test_all_but_one_token_and_the_tail_are_the_dense_kl_with_its_gradient():
    logits = STUDENT.clone().requires_grad_()
    dense = STUDENT.clone().requires_grad_()
    topk_tail_reverse_kl(
        support_logprobs(logits, torch.tensor([[0, 1]])), TEACHER[:, :2]
    ).kl.sum().backward()
    student = torch.log_softmax(dense, dim=-1)
    (student.exp() * (student - TEACHER)).sum().backward()
    torch.testing.assert_close(logits.grad, dense.grad)


def test_the_gradient_flows_through_the_tail():
    # One token, equal on both sides but for the rest, which the chain rule must see.
    logprobs = torch.tensor([[math.log(0.5)]], dtype=torch.float64, requires_grad=True)
    topk_tail_reverse_kl(logprobs, torch.tensor([[0.9]]).double().log()).kl.sum().backward()
    # dD/da of p log(p/q) + (1-p) log((1-p)/(1-q)) with p = e^a: p (log(p/q) - log((1-p)/(1-q))).
    expected = 0.5 * (math.log(0.5 / 0.9) - math.log(0.5 / 0.1))
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(expected)


def test_a_support_of_everything_has_a_tail_of_1e_7():
    student = torch.tensor([[0.5, 0.5]]).log().requires_grad_()
    terms = topk_tail_reverse_kl(student, torch.tensor([[0.5, 0.5]]).log())
    terms.kl.sum().backward()
    assert terms.student_tail.item() == pytest.approx(math.log(1e-7), abs=0.2)
    assert terms.kl.item() == pytest.approx(0.0, abs=1e-6)
    assert student.grad is not None
    assert torch.isfinite(student.grad).all()
    # Rounding may put a support's mass above 1.
    assert torch.isfinite(tail_logprob(torch.tensor([[1e-6]]))).all()


def test_empty_places_are_in_nobodys_support():
    student = torch.cat([STUDENT[:, :1], torch.full((1, 2), torch.nan).double()], dim=-1)
    student.requires_grad_()
    teacher = torch.cat([TEACHER[:, :1], torch.zeros(1, 2).double()], dim=-1)
    terms = topk_tail_reverse_kl(student, teacher, valid=torch.tensor([[1.0, 0.0, 0.0]]))
    terms.kl.sum().backward()
    assert terms.kl.item() == pytest.approx(0.0871767, abs=1e-7)
    assert student.grad is not None
    assert student.grad[0, 1:].tolist() == [0.0, 0.0]


def test_an_empty_support_says_nothing():
    student = torch.full((1, 2), torch.nan, requires_grad=True)
    terms = topk_tail_reverse_kl(student, torch.full((1, 2), torch.nan), valid=torch.zeros(1, 1))
    terms.kl.sum().backward()
    assert terms.kl.item() == 0.0
    assert student.grad is not None
    assert student.grad.tolist() == [[0.0, 0.0]]


def test_an_impossible_token_adds_nothing_and_a_missing_one_everything():
    logprobs = torch.tensor([-torch.inf, -0.5], requires_grad=True)
    kl_terms(logprobs, torch.tensor([-1.0, -0.5])).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, math.exp(-0.5)])
    terms = kl_terms(logprobs.detach(), torch.tensor([-torch.inf, -torch.inf]))
    assert terms.tolist() == [0.0, torch.inf]


def test_teachers_never_get_a_gradient():
    teacher = TEACHER.clone().requires_grad_()
    assert not comparable(STUDENT, teacher)[1].requires_grad


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="one shape"):
        topk_tail_reverse_kl(STUDENT, TEACHER[:, :2])
    with pytest.raises(ValueError, match="one shape"):
        topk_tail_reverse_kl(STUDENT, TEACHER, valid=torch.ones(1, 2))
