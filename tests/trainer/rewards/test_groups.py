import pytest
import torch

from trainer.rewards.groups import (
    eligible_samples,
    group_ids,
    group_pass_rates,
    group_statistics,
    grpo_advantages,
    grpo_passk_advantages,
    pass_at_k_rewards,
    rollout_rewards,
    stepwise_advantages,
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


NAN = float("nan")


def tokens(rewards):
    """Rewards at the last of two tokens, and NaN at mask 0 after it."""
    rows = torch.tensor([[0.0, reward, NAN] for reward in rewards], dtype=torch.float64)
    mask = torch.tensor([[1.0, 1.0, 0.0]] * len(rewards), dtype=torch.float64)
    return rows, mask


def test_a_groups_rollouts_are_standardised_and_padding_gets_nothing():
    rewards, mask = tokens([1.0, 0.0, 1.0, 0.0])
    advantages = grpo_advantages(rewards, mask, torch.zeros(4, dtype=torch.int64))
    scale = 0.5 / ((1 / 3) ** 0.5 + 1e-6)
    for row, sign in zip(advantages, (1, -1, 1, -1), strict=True):
        assert row.tolist() == pytest.approx([sign * scale, sign * scale, 0.0])
    assert rollout_rewards(rewards, mask).tolist() == [1.0, 0.0, 1.0, 0.0]


def test_dr_grpo_does_not_divide():
    rewards, mask = tokens([2.0, 0.0])
    groups = torch.tensor([0, 0])
    advantages = grpo_advantages(rewards, mask, groups, divide_by_std=False)
    assert advantages[:, 0].tolist() == [1.0, -1.0]


def test_a_rollout_alone_has_its_raw_reward_or_nothing():
    rewards, mask = tokens([3.0])
    alone = torch.tensor([0])
    assert grpo_advantages(rewards, mask, alone)[0, 0].item() == pytest.approx(3.0, rel=2e-6)
    raw = grpo_advantages(rewards, mask, alone, divide_by_std=False)
    assert raw[0].tolist() == [3.0, 3.0, 0.0]
    assert not grpo_advantages(rewards, mask, alone, singleton="zero").any()
    with pytest.raises(ValueError, match="singleton"):
        grpo_advantages(rewards, mask, alone, singleton="none")  # pyright: ignore


def test_equal_rewards_teach_nothing():
    rewards, mask = tokens([1.0, 1.0, 1.0])
    assert not grpo_advantages(rewards, mask, torch.zeros(3, dtype=torch.int64)).any()


def test_only_the_best_gets_its_lead_over_the_second():
    rewards, mask = tokens([1.0, 4.0, 2.0, 5.0, 5.0])
    groups = torch.tensor([0, 0, 0, 1, 1])
    plain = grpo_passk_advantages(rewards, mask, groups, divide_by_std=False)
    assert plain[:, 0].tolist() == [0.0, 2.0, 0.0, 0.0, 0.0]
    std = torch.tensor([1.0, 4.0, 2.0], dtype=torch.float64).std().item()
    scaled = grpo_passk_advantages(rewards, mask, groups)
    assert scaled[1].tolist() == pytest.approx([2.0 / (std + 1e-6)] * 2 + [0.0])
    with pytest.raises(ValueError, match="at least two"):
        grpo_passk_advantages(rewards, mask, torch.tensor([0, 0, 0, 1, 2]))


def test_every_k_share_the_largest_reward():
    rewards = torch.tensor([0.0, 1.0, 0.0, 0.0])
    assert pass_at_k_rewards(rewards, 2).tolist() == [1.0, 1.0, 0.0, 0.0]
    assert pass_at_k_rewards(rewards, 1).tolist() == rewards.tolist()
    with pytest.raises(ValueError, match="divide 4"):
        pass_at_k_rewards(rewards, 3)


def test_steps_are_compared_with_those_of_the_same_index():
    rewards = torch.tensor([1.0, 5.0, 0.0, 7.0, 3.0], dtype=torch.float64)
    steps = torch.tensor([0, 1, 0, 1, 2])
    unit = 0.5 / (0.5**0.5 + 1e-6)
    far = 1.0 / (2.0**0.5 + 1e-6)
    expected = torch.tensor([unit, -far, -unit, far, 0.0], dtype=torch.float64)
    torch.testing.assert_close(stepwise_advantages(rewards, steps), expected)


def test_without_the_standard_deviation():
    rewards, steps = torch.tensor([1.0, 5.0, 0.0]), torch.tensor([0, 1, 0])
    advantages = stepwise_advantages(rewards, steps, divide_by_std=False)
    assert advantages.tolist() == [0.5, 0.0, -0.5]


def test_other_prompts_are_other_groups():
    rewards = torch.tensor([1.0, 0.0, 9.0, 9.0])
    steps = torch.zeros(4, dtype=torch.int64)
    prompts = torch.tensor([0, 0, 1, 1])
    advantages = stepwise_advantages(rewards, steps, prompts_N=prompts)
    assert advantages[0].item() == pytest.approx(-advantages[1].item())
    assert advantages[2:].tolist() == [0.0, 0.0]
    assert stepwise_advantages(rewards[:0], steps[:0]).numel() == 0


def test_a_missing_reward_is_refused():
    with pytest.raises(ValueError, match="not finite"):
        stepwise_advantages(torch.tensor([1.0, NAN]), torch.tensor([0, 0]))
