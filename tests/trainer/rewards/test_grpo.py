import pytest
import torch

from trainer.rewards.grpo import (
    grpo_advantages,
    grpo_passk_advantages,
    pass_at_k_rewards,
    rollout_rewards,
    stepwise_advantages,
)

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
