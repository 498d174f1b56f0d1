import pytest
import torch

from trainer.objectives.policy.eligibility import eligible_samples, underperforming_share

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
