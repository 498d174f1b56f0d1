import pytest
import torch

from trainer.objectives.policy.eligibility import (
    eligible_samples,
    horizon_mask,
    replace_advantages,
    underperforming_share,
)

NAN = float("nan")


def test_failures_of_prompts_that_seldom_pass_are_eligible():
    rewards = torch.tensor([0.0, 1.0, -1.0, 0.0, NAN])
    rates = torch.tensor([0.25, 0.25, 0.2, 0.5, 0.0])
    eligible = eligible_samples(rewards, rates, pass_rate_threshold=0.25)
    assert eligible.tolist() == [True, False, True, False, False]
    with pytest.raises(ValueError, match="pass_rate_threshold"):
        eligible_samples(rewards, rates, pass_rate_threshold=1.5)
    with pytest.raises(TypeError):
        eligible_samples(rewards, rates)  # pyright: ignore[reportCallIssue]


def test_the_horizon_counts_policy_tokens():
    mask = torch.tensor([[1.0, 0.0, 1.0, 1.0], [0.0, 1.0, 0.0, 0.0]])
    expected = [[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 0.0]]
    assert horizon_mask(mask, 2).tolist() == expected
    assert horizon_mask(mask, None).tolist() == mask.tolist()
    with pytest.raises(ValueError, match="at least 1"):
        horizon_mask(mask, 0)


def test_the_horizon_starts_anew_in_every_turn():
    ids = torch.tensor([[0, 0, -1, 1, 1, 1], [2, -1, -1, -1, 3, 3]])
    mask = (ids >= 0).float()
    kept = horizon_mask(mask, 1, turn_ids_BT=ids)
    assert kept.tolist() == [[1, 0, 0, 1, 0, 0], [1, 0, 0, 0, 1, 0]]
    assert torch.equal(horizon_mask(mask, 9, turn_ids_BT=ids), mask)


def test_replacement_is_zero_beyond_the_horizon_and_nan_free():
    opd = torch.tensor([[1.0, NAN, NAN], [NAN, NAN, NAN]])
    rewards = torch.tensor([[5.0, 5.0, NAN], [7.0, 7.0, 7.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    replaced = replace_advantages(
        opd,
        rewards,
        mask,
        eligible_BT=torch.tensor([[True], [False]]),
        in_horizon_BT=horizon_mask(mask, 1),
    )
    assert replaced.tolist() == [[1.0, 0.0, 0.0], [7.0, 7.0, 7.0]]


def test_prompts_that_seldom_pass_are_counted_once():
    rates = torch.tensor([0.5, 0.5, 0.5, 1.0, NAN])
    prompts = torch.tensor([4, 4, 4, 9, 11])
    assert underperforming_share(rates, prompts, pass_rate_threshold=0.5) == 0.5
    assert underperforming_share(rates, prompts, pass_rate_threshold=0.0) == 0.0
    nothing = underperforming_share(rates[4:], prompts[4:], pass_rate_threshold=0.5)
    assert nothing != nothing  # NaN
