import math

import pytest
import torch

from trainer.objectives.distributions.forward_kl import forward_kl_metrics, forward_kl_topk
from trainer.objectives.distributions.gather import support_logprobs, top_k_logprobs

STUDENT = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log()
TEACHER = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64).log()


def test_worked_numbers():
    logits = STUDENT.clone().requires_grad_()
    ids = torch.tensor([[0, 1]])
    terms = forward_kl_topk(
        support_logprobs(logits, ids), TEACHER[:, :2], top_k_logprobs(logits, 2)[0], ids
    )
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


def test_metrics_see_policy_tokens_alone():
    student = torch.tensor([[[0.5], [0.2], [torch.nan]]]).log()
    teacher = torch.tensor([[[0.6], [0.4], [torch.nan]]]).log()
    teacher_ids = torch.tensor([[[1], [2], [3]]])
    terms = forward_kl_topk(student, teacher, torch.tensor([[[1], [5], [3]]]), teacher_ids)
    metrics = forward_kl_metrics(terms, torch.tensor([[1.0, 1.0, 0.0]]), support_size=1)
    assert metrics["student_mass"].item() == pytest.approx(0.35)
    assert metrics["student_mass_min"].item() == pytest.approx(0.2)
    assert metrics["teacher_mass_max"].item() == pytest.approx(0.6)
    assert metrics["overlap_ratio"].item() == pytest.approx(0.5)
    assert metrics["overlap_token_advantage"].item() == pytest.approx(-0.6 * math.log(1.2))


def test_metrics_without_overlap_and_without_tokens():
    ids = torch.tensor([[[1]]])
    terms = forward_kl_topk(torch.full((1, 1, 1), -1.0), torch.full((1, 1, 1), -0.5), ids + 1, ids)
    metrics = forward_kl_metrics(terms, torch.ones(1, 1), support_size=1)
    assert metrics["overlap_token_advantage"].item() == 0.0
    nothing = forward_kl_metrics(terms, torch.zeros(1, 1), support_size=1)
    assert len(nothing) == 8
    assert all(math.isnan(value) for value in nothing.values())


def test_bad_input():
    with pytest.raises(ValueError, match="one shape"):
        forward_kl_topk(STUDENT, TEACHER[:, :2])
    with pytest.raises(ValueError, match="both"):
        forward_kl_topk(STUDENT, TEACHER, torch.zeros(1, 3, dtype=torch.long))
