import math

import pytest
import torch

from trainer.objectives.policy.policy_gradient import combined_advantages, term_ratio

NAN = float("nan")


def test_a_turn_without_teacher_has_its_reward_and_nothing_else():
    teacher = torch.tensor([[-0.2, -2.0, NAN], [NAN, NAN, NAN]])
    old = torch.tensor([[-0.5, -1.0, NAN], [-0.4, -0.9, NAN]])
    rewards = torch.tensor([[0.0, 0.0, NAN], [-1.0, -1.0, NAN]])
    valid = torch.tensor([[1.0, 1.0, NAN], [0.0, 0.0, NAN]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]])
    combined = combined_advantages(teacher, old, rewards, valid, mask)
    torch.testing.assert_close(combined, torch.tensor([[0.3, -1.0, 0.0], [-1.0, -1.0, 0.0]]))
    weighted = combined_advantages(
        teacher, old, rewards, valid, mask, opd_coef=2.0, reward_coef=0.5
    )
    torch.testing.assert_close(weighted, torch.tensor([[0.6, -2.0, 0.0], [-0.5, -0.5, 0.0]]))


def test_a_flag_that_is_neither_0_nor_1_is_refused():
    ones = torch.ones(1, 1)
    with pytest.raises(ValueError, match="opd_valid"):
        combined_advantages(ones, ones, ones, 0.5 * ones, ones)


def test_a_small_coefficient_may_dominate_all_the_same():
    assert term_ratio(3.0, 0.1, -0.01) == pytest.approx(30.0)
    assert math.isnan(term_ratio(3.0, 0.1, 0.0))
