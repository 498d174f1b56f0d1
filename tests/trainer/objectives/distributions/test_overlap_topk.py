import math

import pytest
import torch

from trainer.objectives.distributions.overlap_topk import choose_support, overlap_topk


def objective(*logprobs, difference_clip: float | None = 1.0):
    return overlap_topk(*logprobs, difference_clip=difference_clip, clip_low=0.2, clip_high=0.28)


def logs(*probabilities):
    return torch.tensor(probabilities, dtype=torch.float64).log()


def test_worked_numbers():
    logprobs = logs(0.7, 0.2).requires_grad_()
    terms = objective(logprobs, logs(0.5, 0.3), logs(0.9, 0.02))
    terms.loss.backward()
    assert terms.loss.item() == pytest.approx(-0.170229, abs=1e-6)
    # The first token's ratio 1.4 is clipped; the second's .6667 is clipped too, to .8, and wins.
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, 0.0]
    assert terms.clipped.item() == 1.0
    assert terms.difference.item() == pytest.approx(0.625 * 0.587787 + 0.375, abs=1e-6)
    assert terms.size.item() == 2.0


def test_gradient_at_the_old_policy_is_minus_the_advantage():
    old = logs(0.5, 0.3)
    logprobs = old.clone().requires_grad_()
    objective(logprobs, old, logs(0.9, 0.02)).loss.backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(
        logprobs.grad, torch.tensor([-0.367367, 0.375], dtype=torch.float64), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 7.0])
def test_empty_places_and_rows_change_nothing(garbage):
    logprobs = torch.cat([logs(0.7, 0.2), logs(0.1)]).repeat(2, 1)
    old = torch.cat([logs(0.5, 0.3), logs(0.1)]).repeat(2, 1)
    teacher = torch.cat([logs(0.9, 0.02), logs(0.1)]).repeat(2, 1)
    valid = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    for values in (logprobs, old, teacher):
        values[valid == 0] = garbage
    logprobs.requires_grad_()
    terms = objective(logprobs, old, teacher, valid)
    terms.loss.sum().backward()
    assert terms.loss.tolist() == pytest.approx([-0.170229, 0.0], abs=1e-6)
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()
    for report in (terms.clipped, terms.difference, terms.size):
        assert torch.isfinite(report).all()
        assert report[1].item() == 0.0
    assert terms.size.tolist() == [2.0, 0.0]


def test_a_token_without_probability_is_no_part_of_the_support():
    old, teacher = logs(0.5, 0.3, 0.2), logs(0.9, 0.02, 0.0)
    logprobs = logs(0.7, 0.2, 0.1).requires_grad_()
    terms = objective(logprobs, old, teacher)
    terms.loss.backward()
    assert terms.loss.item() == pytest.approx(-0.170229, abs=1e-6)
    assert terms.size.item() == 2.0
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()


def test_without_difference_clip_the_full_gap_acts():
    old = logs(0.5, 0.3)
    terms = objective(old, old, logs(0.9, 0.02), difference_clip=None)
    gap = 0.625 * math.log(1.8) + 0.375 * math.log(15.0)
    assert terms.difference.item() == pytest.approx(gap)


def test_extreme_ratios_stay_finite():
    terms = objective(
        torch.tensor([-0.1]),
        torch.tensor([-100.0]),
        torch.tensor([-200.0]),
        difference_clip=2.0,
    )
    assert terms.loss.item() == pytest.approx(2.0 * math.exp(20.0), rel=1e-5)


def test_support_by_whose_top_k_it_is():
    student, teacher = torch.tensor([[5, 7, 9], [1, 2, 3]]), torch.tensor([[9, 5, 0], [4, 6, 8]])
    both = choose_support(student, teacher, "overlap")
    assert both.ids.tolist() == student.tolist()
    assert both.valid.tolist() == [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
    assert choose_support(student, teacher, "student").ids.tolist() == student.tolist()
    assert choose_support(student, teacher, "teacher").ids.tolist() == teacher.tolist()
    padded = choose_support(torch.tensor([[5, -1]]), torch.tensor([[-1, 5]]), "overlap")
    assert padded.valid.tolist() == [[1.0, 0.0]]
    assert padded.ids.tolist() == [[5, 0]]


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="unknown support subset 'both'"):
        choose_support(
            torch.zeros(1, 1),
            torch.zeros(1, 1),
            "both",  # pyright: ignore[reportArgumentType]
        )
    zeros = torch.zeros(1)
    with pytest.raises(ValueError, match="difference_clip must be positive"):
        objective(zeros, zeros, zeros, difference_clip=0.0)
