import torch

from trainer.objectives.policy.decoupled import composed_weights
from trainer.objectives.policy.truncated_is import comparable_ratio

TRAIN = torch.log(torch.tensor([0.4, 0.4, 0.4, 0.4]))
ROLLOUT = torch.log(torch.tensor([0.4, 0.1, 0.9, float("nan")]))


def test_ratio_of_trainer_over_rollout_engine():
    ratio = comparable_ratio(TRAIN, ROLLOUT)
    torch.testing.assert_close(ratio, torch.tensor([1.0, 4.0, 4 / 9, 1.0]))


def test_a_token_that_cannot_be_compared_weighs_one_whatever_the_cap():
    assert composed_weights(ROLLOUT, TRAIN, TRAIN, engine_cap=0.5)[3].item() == 1.0
