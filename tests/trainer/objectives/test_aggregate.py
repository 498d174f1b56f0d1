import pytest
import torch

from tests.trainer.golden import cases, tolerance
from trainer.objectives.aggregate import count_turns, token_weights, weighted_sum

NAN = float("nan")


@pytest.mark.parametrize("case", cases("verl091_agg_loss"))
def test_modes_of_verl(case):
    values, mask = case["inputs"]["loss_mat"], case["inputs"]["loss_mask"]
    given = case["kwargs"]
    weights = token_weights(
        mask,
        case["mode"],
        num_tokens=given.get("batch_num_tokens"),
        num_sequences=given.get("global_batch_size"),
        horizon=given.get("loss_scale_factor"),
        dp_size=given.get("dp_size", 1),
    )
    actual = weighted_sum(values, weights)
    expected = case["outputs"]["loss"]
    if expected is None or not bool(torch.isfinite(expected)):
        # Where the reference divides 0 by 0 or lets NaN through the mask, a finite value stands.
        assert torch.isfinite(actual)
    else:
        torch.testing.assert_close(actual, expected, **tolerance(actual))


def test_turn_mean_counts_each_turn_once_however_the_rows_are_cut():
    values = torch.tensor([[NAN, 1.0, 3.0, NAN, 10.0, NAN]])
    turn_ids = torch.tensor([[-1, 0, 0, -1, 1, -1]])
    mask = (turn_ids >= 0).float()
    weights = token_weights(mask, "turn-mean-token-mean", turn_ids_BT=turn_ids)
    assert weighted_sum(values, weights).item() == pytest.approx((2.0 + 10.0) / 2)
    assert count_turns(mask, turn_ids) == 2


def test_turn_mean_over_micro_batches_uses_the_global_count():
    turn_ids = torch.tensor([[-1, 2, 2, -1]])
    mask = (turn_ids >= 0).float()
    values = torch.tensor([[NAN, 1.0, 3.0, NAN]])
    weights = token_weights(mask, "turn-mean-token-mean", turn_ids_BT=turn_ids, num_turns=4)
    assert weighted_sum(values, weights).item() == pytest.approx(2.0 / 4)


def test_seq_mean_turn_mean_averages_turns_inside_a_row_first():
    turn_ids = torch.tensor([[0, 0, 1], [2, -1, -1], [-1, -1, -1]])
    mask = (turn_ids >= 0).float()
    values = torch.tensor([[1.0, 3.0, 10.0], [5.0, NAN, NAN], [NAN, NAN, NAN]])
    weights = token_weights(mask, "seq-mean-turn-mean", turn_ids_BT=turn_ids)
    assert weighted_sum(values, weights).item() == pytest.approx(((2 + 10) / 2 + 5) / 2)


def test_an_empty_mask_gives_a_differentiable_zero():
    values = torch.full((2, 3), NAN, requires_grad=True)
    turn_ids = torch.full((2, 3), -1)
    loss = weighted_sum(
        values, token_weights(torch.zeros(2, 3), "turn-mean-token-mean", turn_ids_BT=turn_ids)
    )
    loss.backward()
    assert loss.item() == 0.0
    assert values.grad is not None
    assert values.grad.abs().sum().item() == 0.0


def test_policy_tokens_without_turn_are_refused():
    with pytest.raises(ValueError, match="no turn id"):
        token_weights(torch.ones(1, 1), "turn-mean-token-mean", turn_ids_BT=torch.tensor([[-1]]))
    with pytest.raises(ValueError, match="needs turn ids"):
        token_weights(torch.ones(1, 1), "turn-mean-token-mean")
