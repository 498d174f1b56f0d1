import pytest
import torch

from trainer.objectives.distributions.gather import at_least_float32, overlap_counts, shared_ids


def test_overlap_of_unordered_sets_leaves_empty_places_out():
    ids = torch.tensor([[7, 2, 9], [1, -1, -1]])
    others = torch.tensor([[9, 7, 3, 100], [-1, -1, 5, 1]], dtype=torch.int32)
    assert shared_ids(ids, others).tolist() == [[True, False, True], [True, False, False]]
    assert overlap_counts(ids, others).tolist() == [2, 1]
    assert overlap_counts(ids, torch.zeros(2, 0, dtype=torch.long)).tolist() == [0, 0]


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="last dimension"):
        shared_ids(torch.zeros(2, 5), torch.zeros(3, 5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_narrow_types_are_computed_in_float32(dtype):
    wanted = torch.float64 if dtype == torch.float64 else torch.float32
    assert at_least_float32(torch.zeros(1, dtype=dtype)).dtype == wanted
