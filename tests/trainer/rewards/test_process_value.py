import pytest
import torch

from trainer.rewards.process_value import marginal_utilities


def test_utilities_add_up_to_what_the_whole_way_was_worth():
    values = torch.tensor([-3.2, -2.5, -2.9, -0.4, -0.05], dtype=torch.float64)
    utilities = marginal_utilities(values)
    assert utilities.tolist() == pytest.approx([0.7, -0.4, 2.5, 0.35])
    assert utilities.sum().item() == pytest.approx((values[-1] - values[0]).item())


def test_one_value_has_no_utility():
    with pytest.raises(ValueError, match="two values"):
        marginal_utilities(torch.tensor([-1.0]))
