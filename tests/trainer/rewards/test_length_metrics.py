import math

import pytest
import torch

from trainer.rewards.length_metrics import length_metrics


def test_lengths_of_right_and_wrong_answers():
    lengths = torch.tensor([0, 10, 20, 100])
    correct = torch.tensor([float("nan"), 1.0, 1.0, 0.0])
    metrics = length_metrics(lengths, correct)
    assert metrics["length/mean"] == 32.5
    assert (metrics["length/min"], metrics["length/max"], metrics["length/p50"]) == (0, 100, 15)
    assert metrics["length/empty_frac"] == 0.25
    assert metrics["length/wrong_minus_correct"] == pytest.approx(85.0)


def test_what_there_is_none_of_is_nan_not_zero():
    metrics = length_metrics(torch.zeros(0), torch.zeros(0))
    assert all(math.isnan(value) for value in metrics.values())
    assert math.isnan(length_metrics(torch.ones(1), torch.ones(1))["length/wrong_mean"])
