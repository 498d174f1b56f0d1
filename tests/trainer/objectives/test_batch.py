import pytest
import torch

from trainer.objectives.batch import (
    count_turns,
    selected,
    sequence_means,
    token_weights,
    weighted_sum,
)
from trainer.objectives.names import AggregationMode

NAN = float("nan")
VALUES = torch.tensor([[1.0, 2.0, 3.0, NAN], [5.0, NAN, NAN, NAN], [NAN, NAN, NAN, NAN]])
MASK = torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 11 / 4),
        ("token-sum", 11.0),
        ("seq-mean-token-sum", 11 / 2),
        ("seq-mean-token-sum-norm", 11 / 2 / 4),
        ("seq-mean-token-mean", (2 + 5) / 2),
    ],
)
def test_modes_select_before_they_sum(mode: AggregationMode, expected: float):
    assert weighted_sum(VALUES, token_weights(MASK, mode)).item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("mode", "counts"),
    [
        ("token-mean", {"num_tokens": 8}),
        ("seq-mean-token-mean", {"num_sequences": 4}),
        ("seq-mean-token-sum", {"num_sequences": 4}),
        ("turn-mean-token-mean", {"num_turns": 4}),
        ("seq-mean-turn-mean", {"num_sequences": 4}),
    ],
)
def test_two_ranks_add_up_and_need_the_count_of_both(mode: AggregationMode, counts):
    turn_ids = torch.where(MASK > 0, torch.arange(3).unsqueeze(-1), -1)
    weights = token_weights(MASK, mode, turn_ids_BT=turn_ids, **counts)
    of_a_rank = token_weights(MASK, mode, turn_ids_BT=turn_ids, dp_size=2, **counts)
    torch.testing.assert_close(of_a_rank, weights * 2)
    with pytest.raises(ValueError, match="over several ranks needs num_"):
        token_weights(MASK, mode, turn_ids_BT=turn_ids, dp_size=2)


def test_sequence_means_are_of_rows_or_of_turns_and_never_across_rows():
    torch.testing.assert_close(
        sequence_means(VALUES, MASK), torch.tensor([[2.0] * 4, [5.0] * 4, [0.0] * 4])
    )
    # Ids that count per row: the 0 of the second row is another turn.
    turn_ids = torch.tensor([[0, 0, 1, 1], [0, -1, -1, -1], [-1, -1, -1, -1]])
    expected = torch.tensor([[1.5, 1.5, 3.0, 3.0], [5.0, 0, 0, 0], [0, 0, 0, 0]])
    torch.testing.assert_close(sequence_means(VALUES, MASK, turn_ids), expected)
    with pytest.raises(ValueError, match="no turn id"):
        sequence_means(VALUES, MASK, torch.full((3, 4), -1))


def test_inputs_that_were_selected_have_finite_gradients():
    values = VALUES.clone().requires_grad_()
    weighted_sum(selected(values, MASK).exp(), MASK).backward()
    assert values.grad is not None
    torch.testing.assert_close(values.grad, selected(VALUES.exp(), MASK))


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
