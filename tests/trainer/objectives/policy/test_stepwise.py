import pytest
import torch

from trainer.objectives.policy.stepwise import stepwise_advantages

NAN = float("nan")


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
