import pytest
import torch

from trainer.rewards.length import (
    anchor_penalty,
    group_lambda,
    group_penalty,
    next_anchor,
    uniform_penalty,
)

NAN = float("nan")
ONE = torch.ones(1)


def test_uniform_penalty_pays_for_every_token():
    assert uniform_penalty(ONE, torch.tensor([1000.0])).tolist() == pytest.approx([0.9])
    with pytest.raises(ValueError, match="negative"):
        uniform_penalty(ONE, -ONE)
    with pytest.raises(ValueError, match="one entry per sample"):
        uniform_penalty(ONE, torch.ones(2))


def test_a_short_wrong_answer_gains_nothing_from_its_group():
    lengths = torch.tensor([400.0, 600.0, 800.0, 1200.0])
    correct = torch.tensor([1.0, 0.0, 1.0, 0.0])
    assert group_lambda(lengths).tolist() == [0.5, 0.25, 0.0, -0.5]
    penalised = group_penalty(correct, lengths, correct)
    assert penalised.tolist() == pytest.approx([1.05, 0.0, 1.0, -0.05])
    assert group_lambda(torch.tensor([5.0, 5.0])).tolist() == [0.0, 0.0]
    assert group_lambda(torch.zeros(0)).numel() == 0


def test_only_what_exceeds_the_anchor_costs():
    rewards, lengths = torch.ones(3), torch.tensor([1060.0, 500.0, 9999.0])
    penalised = anchor_penalty(rewards, lengths, torch.tensor([530.0, 530.0, NAN]))
    assert penalised.tolist() == pytest.approx([0.99, 1.0, 1.0])
    with pytest.raises(ValueError, match="anchor"):
        anchor_penalty(ONE, ONE, torch.zeros(1))


def test_an_anchor_is_set_once_and_frozen():
    assert next_anchor(None, pass_rate=0.9, mean_length=700.0) is None
    assert next_anchor(None, pass_rate=0.95, mean_length=700.0) == 700.0
    assert next_anchor(700.0, pass_rate=1.0, mean_length=300.0) == 700.0
