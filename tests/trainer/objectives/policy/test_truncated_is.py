import pytest
import torch

from trainer.objectives.policy.truncated_is import truncated_weights

TRAIN = torch.log(torch.tensor([0.4, 0.4, 0.4, 0.4]))
ROLLOUT = torch.log(torch.tensor([0.4, 0.1, 0.9, float("nan")]))


def test_cap_and_lower_bound():
    result = truncated_weights(TRAIN, ROLLOUT, cap=2.0, lower=0.5)
    torch.testing.assert_close(result.weights, torch.tensor([1.0, 2.0, 0.5, 1.0]))
    torch.testing.assert_close(result.ratio, torch.tensor([1.0, 4.0, 4 / 9, 1.0]))
    torch.testing.assert_close(result.distance, torch.tensor([0.0, 3.0, 5 / 9, 0.0]))
    assert result.capped.tolist() == [0.0, 1.0, 1.0, 0.0]
    without = truncated_weights(TRAIN, ROLLOUT, cap=2.0)
    torch.testing.assert_close(without.weights[2].item(), 4 / 9)


def test_a_token_that_cannot_be_compared_weighs_one_whatever_the_bounds():
    result = truncated_weights(TRAIN, ROLLOUT, cap=0.5)
    assert result.weights[3].item() == 1.0
    assert result.capped[3].item() == 0.0


def test_bad_bounds_are_refused():
    with pytest.raises(ValueError, match="positive"):
        truncated_weights(TRAIN, ROLLOUT, cap=0.0)
    with pytest.raises(ValueError, match="lower"):
        truncated_weights(TRAIN, ROLLOUT, cap=2.0, lower=3.0)
