import pytest
import torch

from trainer.objectives.normalise import normalise

NAN = float("nan")


def test_statistics_are_of_the_selected_values():
    values = torch.tensor([[1.0, 3.0, NAN], [100.0, 5.0, NAN]], dtype=torch.float64)
    selected = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
    result = normalise(values, selected)
    expected = torch.tensor([[-1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(result.values, expected, atol=1e-7, rtol=0)
    assert (result.mean.item(), result.std.item(), result.count) == (3.0, 2.0, 3)
    assert result.num_unnormalised == 0


@pytest.mark.parametrize(("values", "count"), [([7.0, NAN], 1), ([4.0, 4.0], 2), ([NAN, NAN], 0)])
def test_too_few_or_equal_values_stay_as_they_are_and_are_counted(values, count):
    tensor = torch.tensor(values)
    result = normalise(tensor, ~tensor.isnan())
    assert result.values.tolist() == [0.0 if v != v else v for v in values]
    assert (result.applied, result.num_unnormalised) == (False, count)
    assert result.mean.isnan().item() == (count == 0)
    assert result.std.isnan().item() == (count < 2)


def test_a_selected_nan_is_refused():
    with pytest.raises(ValueError, match="not finite"):
        normalise(torch.tensor([1.0, NAN]), torch.ones(2))
