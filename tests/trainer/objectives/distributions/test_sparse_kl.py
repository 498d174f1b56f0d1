import math

import pytest
import torch

from trainer.objectives.distributions.sparse_kl import sparse_kl, sparse_policy_gradient


def logs(*probabilities):
    return torch.tensor(probabilities, dtype=torch.float64).log()


STUDENT, TEACHER = logs(0.5, 0.25, 0.25), logs(0.7, 0.2, 0.1)


def test_whole_vocabulary_is_the_dense_kl():
    reverse = sparse_kl(STUDENT, TEACHER, direction="reverse")
    assert reverse.loss.item() == pytest.approx(0.1166225, abs=1e-7)
    assert reverse.student_mass.item() == pytest.approx(1.0)
    forward = sparse_kl(STUDENT, TEACHER, direction="forward").loss
    expected = torch.sum(TEACHER.exp() * (TEACHER - STUDENT))
    assert forward.item() == pytest.approx(expected.item())


def test_worked_forward_of_the_first_two_tokens():
    terms = sparse_kl(STUDENT[:2], TEACHER[:2], direction="forward")
    assert terms.loss.item() == pytest.approx(0.190902, abs=1e-6)
    assert terms.student_mass.item() == pytest.approx(0.75)
    assert terms.teacher_mass.item() == pytest.approx(0.9)


def test_skewed_is_the_mixture_of_both():
    forward = sparse_kl(STUDENT, TEACHER, direction="forward").loss
    reverse = sparse_kl(STUDENT, TEACHER, direction="reverse").loss
    skewed = sparse_kl(STUDENT, TEACHER, direction="skewed", alpha=0.25).loss
    torch.testing.assert_close(skewed, 0.25 * forward + 0.75 * reverse)


def test_gradient_of_the_reverse_goes_through_the_weights():
    student = STUDENT.clone().requires_grad_()
    sparse_kl(student, TEACHER, direction="reverse").loss.backward()
    assert student.grad is not None
    torch.testing.assert_close(student.grad, STUDENT.exp() * (STUDENT - TEACHER + 1.0))


@pytest.mark.parametrize("direction", ["reverse", "forward", "skewed"])
def test_the_tail_is_one_more_token(direction):
    terms = sparse_kl(STUDENT[:2], TEACHER[:2], direction=direction, tail=True)
    whole = sparse_kl(STUDENT, TEACHER, direction=direction)
    torch.testing.assert_close(terms.loss, whole.loss)
    assert terms.student_mass.item() == pytest.approx(0.75)
    # Mass that leaves the support has nowhere free to go: the gradient is that of three tokens.
    logits = STUDENT.clone().requires_grad_()
    dense = sparse_kl(torch.log_softmax(logits, -1), TEACHER, direction=direction).loss
    through = torch.log_softmax(logits, -1)[:2]
    with_tail = sparse_kl(through, TEACHER[:2], direction=direction, tail=True).loss
    torch.testing.assert_close(
        torch.autograd.grad(with_tail, logits)[0], torch.autograd.grad(dense, logits)[0]
    )


def test_token_clip_counts_the_tail_among_the_elements():
    terms = sparse_kl(STUDENT[:2], TEACHER[:2], direction="forward", token_clip=0.05, tail=True)
    elements = TEACHER.exp() * (TEACHER - STUDENT)
    assert terms.loss.item() == pytest.approx(elements.clamp(max=0.05).sum().item())
    assert terms.clipped.item() == pytest.approx(1 / 3)


def test_token_clip_cuts_from_above_only():
    student = STUDENT.clone().requires_grad_()
    terms = sparse_kl(student, TEACHER, direction="forward", token_clip=0.05)
    terms.loss.backward()
    elements = TEACHER.exp() * (TEACHER - STUDENT)
    assert terms.loss.item() == pytest.approx(elements.clamp(max=0.05).sum().item())
    assert terms.clipped.item() == pytest.approx(1 / 3)
    assert student.grad is not None
    assert student.grad.tolist() == pytest.approx([0.0, -0.2, -0.1])


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("direction", ["reverse", "forward", "skewed"])
@pytest.mark.parametrize("tail", [False, True])
def test_empty_places_change_nothing(tail, direction, garbage):
    extra = torch.tensor([garbage], dtype=torch.float64)
    valid = torch.tensor([1.0, 1.0, 1.0, 0.0])
    student = torch.cat([STUDENT, extra]).requires_grad_()
    settings = {"direction": direction, "token_clip": 0.05, "tail": tail}
    terms = sparse_kl(student, torch.cat([TEACHER, extra]), valid, **settings)
    alone = sparse_kl(STUDENT, TEACHER, **settings)
    terms.loss.backward()
    for name in ("loss", "clipped", "student_mass", "teacher_mass"):
        torch.testing.assert_close(getattr(terms, name), getattr(alone, name))
    assert student.grad is not None
    assert torch.isfinite(student.grad).all()


def test_policy_gradient_weighs_by_the_old_student_and_bounds_a_bad_step():
    old, teacher = logs(0.5, 0.3), logs(0.9, 0.02)
    terms = sparse_policy_gradient(old, old, teacher)
    expected = -(0.625 * math.log(1.8) + 0.375 * math.log(0.02 / 0.3))
    assert terms.loss.item() == pytest.approx(expected)
    # A ratio of 10 on a token with negative advantage: at most 3 times the advantage.
    far = sparse_policy_gradient(logs(0.9), logs(0.09), logs(0.01)).loss.item()
    assert far == pytest.approx(3.0 * math.log(9.0))


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="unknown direction 'up'"):
        sparse_kl(STUDENT, TEACHER, direction="up")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="alpha"):
        sparse_kl(STUDENT, TEACHER, direction="skewed", alpha=1.5)
    with pytest.raises(ValueError, match="token_clip"):
        sparse_kl(STUDENT, TEACHER, direction="reverse", token_clip=0.0)
