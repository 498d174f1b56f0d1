import pytest
import torch

from trainer.objectives.policy.opsm import opsm_mask

NAN = float("nan")
# Rows: left the old policy; came closer to it; nothing at mask 1.
OLD = torch.tensor([[-1.0, -1.0, -1.0, NAN], [-1.0, -1.0, NAN, NAN], [NAN] * 4])
NEW = torch.tensor([[-1.5, -1.1, -0.9, NAN], [-0.5, -1.1, NAN, NAN], [NAN] * 4])
MASK = torch.tensor([[1.0, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]])
ADVANTAGES = torch.tensor([[1.0, -1, -2, -9], [-1, -1, -9, -9], [-9, -9, -9, -9]])


def test_negative_tokens_of_a_sequence_that_was_left():
    result = opsm_mask(NEW, OLD, ADVANTAGES, MASK)
    assert result.keep_BT.tolist() == [[1, 0, 0, 1], [1, 1, 1, 1], [1, 1, 1, 1]]
    torch.testing.assert_close(result.share_BT[0], torch.tensor([2 / 3, 2 / 3, 2 / 3, 0]))
    assert result.share_BT[1:].sum().item() == 0


def test_scope_sequence_takes_all_its_tokens():
    result = opsm_mask(NEW, OLD, ADVANTAGES, MASK, scope="sequence")
    assert result.keep_BT.tolist() == [[0, 0, 0, 1], [1, 1, 1, 1], [1, 1, 1, 1]]


def test_statistic_of_a_turn_does_not_see_other_turns():
    turn_ids = torch.tensor([[0, 0, 1, -1], [2, 3, -1, -1], [-1] * 4])
    result = opsm_mask(NEW, OLD, ADVANTAGES, MASK, turn_ids_BT=turn_ids)
    # The last token of row 0 came closer, the second of row 1 left, each as a turn of its own.
    assert result.keep_BT.tolist() == [[1, 0, 1, 1], [1, 0, 1, 1], [1, 1, 1, 1]]


def test_delta_is_a_bound_on_the_mean():
    assert opsm_mask(NEW, OLD, ADVANTAGES, MASK, delta=0.2).keep_BT.min().item() == 1.0


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="scope"):
        opsm_mask(NEW, OLD, ADVANTAGES, MASK, scope="turn")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="delta"):
        opsm_mask(NEW, OLD, ADVANTAGES, MASK, delta=-0.1)
