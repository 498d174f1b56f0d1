import pytest
import torch

from trainer.objectives.policy.icepop import icepop_weights

ROLLOUT = torch.tensor([-1.0, -1.0, -1.0, float("nan"), -1.0])
TRAIN = torch.tensor([-1.0, 0.0, -3.0, -1.0, 1e4])


def test_weights_outside_the_bounds_are_zero():
    result = icepop_weights(TRAIN.requires_grad_(), ROLLOUT, lower=0.5, upper=2.0)
    assert result.weights.tolist() == [1.0, 0.0, 0.0, 1.0, 0.0]
    assert result.capped.tolist() == [0.0, 1.0, 1.0, 0.0, 1.0]
    assert torch.isfinite(result.ratio).all()
    assert not result.weights.requires_grad


def test_bounds_out_of_order_are_refused():
    with pytest.raises(ValueError, match="icepop"):
        icepop_weights(TRAIN, ROLLOUT, lower=2.0, upper=1.0)
