import math

import pytest
import torch

from tests.trainer.live import support_logprobs, top_ids
from trainer.objectives.distributions.kl import forward_kl_topk

STUDENT = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log()
TEACHER = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64).log()


def test_worked_numbers():
    logits = STUDENT.clone().requires_grad_()
    ids = torch.tensor([[0, 1]])
    terms = forward_kl_topk(support_logprobs(logits, ids), TEACHER[:, :2], top_ids(logits, 2), ids)
    terms.loss.sum().backward()
    assert terms.loss.item() == pytest.approx(0.190902, abs=1e-6)
    assert terms.student_mass.item() == pytest.approx(0.75)
    assert terms.teacher_mass.item() == pytest.approx(0.9)
    assert terms.overlap_count is not None
    assert terms.overlap_token_advantage is not None
    assert terms.overlap_count.tolist() == [2]
    assert terms.overlap_token_advantage.item() == pytest.approx(-0.095451, abs=1e-6)
    assert logits.grad is not None
    torch.testing.assert_close(
        logits.grad, torch.tensor([[-0.25, 0.025, 0.225]], dtype=torch.float64)
    )


@pytest.mark.parametrize(
    ("clamp", "loss", "gradient"), [(None, 40.0, [-1.0, 1.0]), (-10.0, 10.0, [0.0, 0.0])]
)
def test_a_clamp_takes_the_gradient_where_the_student_is_worst(clamp, loss, gradient):
    logits = torch.tensor([[0.0, 40.0, 0.0]], requires_grad=True)
    terms = forward_kl_topk(
        support_logprobs(logits, torch.tensor([[0, 2]])),
        torch.tensor([[0.0, -40.0]]),
        log_prob_min_clamp=clamp,
    )
    terms.loss.sum().backward()
    assert terms.loss.item() == pytest.approx(loss, abs=1e-2)
    assert logits.grad is not None
    assert logits.grad[0, :2].tolist() == pytest.approx(gradient, abs=1e-6)
    # Masses are of the log-probs as they were.
    assert terms.student_mass.item() < 1e-16


def test_a_truncated_sum_can_be_negative_before_its_clamp():
    student, teacher = torch.tensor([[math.log(0.9)]]), torch.tensor([[math.log(0.5)]])
    assert forward_kl_topk(student, teacher, clamp_negative=False).loss.item() < -0.2
    assert forward_kl_topk(student, teacher).loss.item() == 0.0


def test_empty_places_and_masked_tokens_count_for_nothing():
    student = torch.tensor([[-1.0, torch.nan], [torch.nan, -torch.inf]], requires_grad=True)
    teacher = torch.tensor([[-0.5, 0.0], [torch.nan, torch.nan]])
    ids = torch.tensor([[3, 0], [0, 0]])
    terms = forward_kl_topk(
        student,
        teacher,
        ids,
        ids,
        log_prob_min_clamp=-5.0,
        valid=torch.tensor([[1.0, 0.0], [0.0, 0.0]]),
    )
    terms.loss.sum().backward()
    expected = math.exp(-0.5) * 0.5
    assert terms.loss.tolist() == pytest.approx([expected, 0.0])
    assert terms.teacher_mass.tolist() == pytest.approx([math.exp(-0.5), 0.0])
    assert terms.overlap_count is not None
    assert terms.overlap_count.tolist() == [1, 0]
    assert student.grad is not None
    assert student.grad.tolist() == [[pytest.approx(-math.exp(-0.5)), 0.0], [0.0, 0.0]]


def test_bad_input():
    with pytest.raises(ValueError, match="one shape"):
        forward_kl_topk(STUDENT, TEACHER[:, :2])
    with pytest.raises(ValueError, match="both"):
        forward_kl_topk(STUDENT, TEACHER, torch.zeros(1, 3, dtype=torch.long))
