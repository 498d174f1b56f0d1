import pytest
import torch

from trainer.objectives.distributions.gather import overlap_counts, shared_ids


def test_overlap_of_unordered_sets_leaves_empty_places_out():
    ids = torch.tensor([[7, 2, 9], [1, -1, -1]])
    others = torch.tensor([[9, 7, 3, 100], [-1, -1, 5, 1]], dtype=torch.int32)
    assert shared_ids(ids, others).tolist() == [[True, False, True], [True, False, False]]
    assert overlap_counts(ids, others).tolist() == [2, 1]
    assert overlap_counts(ids, torch.zeros(2, 0, dtype=torch.long)).tolist() == [0, 0]


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="last dimension"):
        shared_ids(torch.zeros(2, 5), torch.zeros(3, 5))
