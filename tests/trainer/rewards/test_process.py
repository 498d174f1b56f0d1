import pytest
import torch

from trainer.rewards.process import (
    marginal_utilities,
    outcome_mask,
    process_mask,
    returns,
    token_preserving_advantages,
)


def test_utilities_add_up_to_what_the_whole_way_was_worth():
    values = torch.tensor([-3.2, -2.5, -2.9, -0.4, -0.05], dtype=torch.float64)
    utilities = marginal_utilities(values)
    assert utilities.tolist() == pytest.approx([0.7, -0.4, 2.5, 0.35])
    assert utilities.sum().item() == pytest.approx((values[-1] - values[0]).item())


def test_one_value_has_no_utility():
    with pytest.raises(ValueError, match="two values"):
        marginal_utilities(torch.tensor([-1.0]))


NAN = float("nan")
MASK = torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
REWARDS = torch.tensor([[0.2, 0.0, 1.0, NAN], [0.4, 0.0, NAN, NAN], [NAN] * 4])


def test_the_outcome_is_the_last_token_even_if_its_reward_is_zero():
    assert outcome_mask(MASK).int().tolist() == [[0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    assert process_mask(REWARDS, MASK).int().tolist() == [[1, 0, 0, 0], [1, 0, 0, 0], [0] * 4]


def test_kinds_are_normalised_apart_and_then_summed_from_the_right():
    result = token_preserving_advantages(REWARDS, MASK)
    half = 0.5**0.5
    # Two values of a kind are always +-sqrt(1/2) apart from their mean, whatever their scale.
    expected = torch.tensor([[-half, 0.0, half, 0.0], [half, -half, 0.0, 0.0], [0.0] * 4])
    torch.testing.assert_close(result.rewards, expected, atol=1e-4, rtol=0)
    sums = torch.tensor([[0.0, half, half, 0.0], [0.0, -half, 0.0, 0.0], [0.0] * 4])
    torch.testing.assert_close(result.advantages, sums, atol=1e-4, rtol=0)
    assert (result.outcome.count, result.process.count) == (2, 2)


def test_equal_outcomes_teach_nothing_and_a_single_one_stays():
    rewards = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    assert not token_preserving_advantages(rewards, torch.ones(2, 2)).advantages.any()
    alone = token_preserving_advantages(rewards[:1], torch.ones(1, 2))
    assert alone.advantages.tolist() == [[1.0, 1.0]]
    assert alone.outcome.num_unnormalised == 1


def test_returns_skip_what_is_masked():
    assert returns(REWARDS, MASK)[0].tolist() == pytest.approx([1.2, 1.0, 1.0, 0.0])
