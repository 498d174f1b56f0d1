import pytest
import torch

from trainer.rewards.groups import (
    eligible_samples,
    group_ids,
    group_pass_rates,
    group_statistics,
    underperforming_share,
)


def test_groups_are_numbered_by_first_appearance():
    assert group_ids(["b", "a", "b", ("c", 1)]).tolist() == [0, 1, 0, 2]


def test_statistics_of_each_samples_group():
    values = torch.tensor([1.0, 10.0, 3.0, 10.0, 5.0], dtype=torch.float64)
    result = group_statistics(values, torch.tensor([0, 1, 0, 1, 2]))
    assert result.mean.tolist() == [2.0, 10.0, 2.0, 10.0, 5.0]
    assert result.count.tolist() == [2.0, 2.0, 2.0, 2.0, 1.0]
    assert result.std[0].item() == pytest.approx(2**0.5)
    assert result.std[1].item() == 0.0
    assert result.std[4].isnan()


def test_pass_rate_is_the_share_of_positive_rewards():
    rates = group_pass_rates(torch.tensor([1.0, 0.0, -1.0, 0.5]), torch.tensor([0, 0, 0, 0]))
    assert rates.tolist() == [0.5] * 4
    assert group_pass_rates(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).numel() == 0


@pytest.mark.parametrize(
    ("values", "groups", "fragment"),
    [
        ([1.0, 2.0], [0], "must both be"),
        ([1.0], [-1], "negative"),
        ([float("nan")], [0], "not finite"),
        ([1], [0], "floats"),
    ],
)
def test_bad_input(values, groups, fragment):
    with pytest.raises(ValueError, match=fragment):
        group_statistics(torch.tensor(values), torch.tensor(groups))


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


def test_prompts_that_seldom_pass_are_counted_once():
    rates = torch.tensor([0.5, 0.5, 0.5, 1.0, NAN])
    prompts = torch.tensor([4, 4, 4, 9, 11])
    assert underperforming_share(rates, prompts, pass_rate_threshold=0.5) == 0.5
    assert underperforming_share(rates, prompts, pass_rate_threshold=0.0) == 0.0
    nothing = underperforming_share(rates[4:], prompts[4:], pass_rate_threshold=0.5)
    assert nothing != nothing  # NaN
