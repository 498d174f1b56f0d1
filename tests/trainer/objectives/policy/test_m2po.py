import math

import pytest
import torch

from trainer.objectives.batch import selected
from trainer.objectives.policy.m2po import m2po_clip
from trainer.objectives.policy.ppo import ppo_clip

NAN = float("nan")
OLD = torch.full((6,), -2.0, dtype=torch.float64)
LOG_RATIOS = torch.tensor([0.1, -0.2, 0.6, -0.3, 0.9, NAN], dtype=torch.float64)
ADVANTAGES = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, NAN], dtype=torch.float64)
MASK = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
"""A clip can act on the first three; the fourth and fifth move against their advantage."""


def clip(**options):
    return m2po_clip(OLD + LOG_RATIOS, OLD, ADVANTAGES, MASK, **options)


def test_threshold_is_the_largest_token_under_which_the_clipped_moment_fits():
    result = clip(budget=0.04, floor_low=0.0, floor_high=0.0)
    assert result.moment_before == pytest.approx((0.01 + 0.04 + 0.36) / 3)
    # At 0.2: (0.01 + 0.04 + 0.04) / 3 = 0.03 fits, at 0.6 it is 0.137.
    assert result.threshold == pytest.approx(0.2)
    assert result.moment_after == pytest.approx(0.03)
    assert result.clip_low == pytest.approx(1 - math.exp(-0.2))
    assert result.clip_high == pytest.approx(math.exp(0.2) - 1)
    assert clip(budget=0.02).threshold == pytest.approx(0.1)


def test_floors():
    result = clip(budget=0.04)
    assert (result.clip_low, result.clip_high) == (0.3, 0.5)
    assert result.threshold == pytest.approx(0.2)


def test_a_batch_within_the_budget_has_the_floor_below_and_no_bound_above():
    result = clip(budget=0.2)
    assert result.threshold is None
    assert result.moment_after == result.moment_before
    assert (result.clip_low, result.clip_high) == (0.3, 1e5)


def test_no_threshold_fits_a_budget_below_the_smallest_token():
    result = clip(budget=0.001, floor_low=0.0, floor_high=0.0)
    assert (result.threshold, result.clip_low, result.clip_high) == (0.0, 0.0, 0.0)
    assert result.moment_after == result.moment_before


def test_tokens_beyond_the_threshold_are_clipped_and_garbage_has_no_gradient():
    leaf = (OLD + LOG_RATIOS).requires_grad_()
    bounds = clip(floor_low=0.0, floor_high=0.0)
    loss = ppo_clip(
        selected(leaf, MASK),
        OLD,
        selected(ADVANTAGES, MASK),
        clip_low=bounds.clip_low,
        clip_high=bounds.clip_high,
    ).loss
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    # The second sets the threshold: bounded a rounding below itself, and so clipped too.
    expected = [-math.exp(0.1), 0.0, 0.0, -math.exp(-0.3), math.exp(0.9), 0.0]
    torch.testing.assert_close(grad, torch.tensor(expected, dtype=torch.float64))


def test_nothing_to_clip():
    result = m2po_clip(OLD, OLD, ADVANTAGES, MASK)
    assert (result.threshold, result.moment_before, result.moment_after) == (None, 0.0, 0.0)
    assert (result.clip_low, result.clip_high) == (0.3, 1e5)


def test_bad_budget_and_floors_are_refused():
    for options in ({"budget": 0.0}, {"floor_low": -0.1}):
        with pytest.raises(ValueError, match="m2po"):
            clip(**options)
