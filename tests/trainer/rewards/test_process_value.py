import pytest
import torch

from trainer.rewards.process_value import answer_values, marginal_utilities, place_utilities

NAN = float("nan")


def test_values_are_means_over_the_answer():
    logprobs = torch.tensor([[-3.0, -1.0, NAN], [-1.0, NAN, NAN]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    assert answer_values(logprobs, mask).tolist() == [-2.0, -1.0]
    with pytest.raises(ValueError, match="no answer tokens"):
        answer_values(logprobs, torch.zeros_like(mask))
    with pytest.raises(ValueError, match="not finite"):
        answer_values(logprobs, torch.ones_like(mask))


def test_worked_utilities_stand_at_the_last_token_of_their_episodes():
    values = torch.tensor([-3.2, -2.5, -2.9, -0.4, -0.05], dtype=torch.float64)
    utilities = marginal_utilities(values)
    assert utilities.tolist() == pytest.approx([0.7, -0.4, 2.5, 0.35])
    rewards = place_utilities(utilities, [1, 3, 4, 6], 6)
    assert rewards.tolist() == pytest.approx([0.7, 0.0, -0.4, 2.5, 0.0, 0.35])
    assert rewards.sum().item() == pytest.approx((values[-1] - values[0]).item())


@pytest.mark.parametrize("ends", [[1, 1], [2, 1], [1], [1, 9], [0, 1]])
def test_episodes_that_do_not_fit_are_refused(ends):
    with pytest.raises(ValueError, match="rising episode ends"):
        place_utilities(torch.tensor([0.1, 0.2]), ends, 3)


def test_one_value_has_no_utility():
    with pytest.raises(ValueError, match="empty prefix"):
        marginal_utilities(torch.tensor([-1.0]))
