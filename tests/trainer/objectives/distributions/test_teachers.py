import pytest
import torch

from trainer.objectives.distributions.teachers import ema_update, trust_region_logits


def test_a_moving_average_of_a_state_dict_in_place():
    weight, steps = torch.tensor([1.0, 2.0]), torch.tensor(3)
    teacher = {"weight": weight, "steps": steps}
    student = {"weight": torch.tensor([3.0, 2.0], requires_grad=True), "steps": torch.tensor(9)}
    ema_update(teacher, student, 0.25)
    assert weight.tolist() == [1.5, 2.0]
    assert steps.item() == 9
    assert not weight.requires_grad


def test_a_student_of_another_type_is_averaged_in_the_teachers():
    teacher = torch.tensor([1.0])
    ema_update(teacher, torch.tensor([2.0], dtype=torch.bfloat16), 0.05)
    assert teacher.dtype == torch.float32
    assert teacher.item() == pytest.approx(1.05)


def test_nothing_changes_if_anything_does_not_fit():
    teacher = {"a": torch.zeros(1), "b": torch.zeros(2)}
    with pytest.raises(ValueError, match="b has shape"):
        ema_update(teacher, {"a": torch.ones(1), "b": torch.ones(3)}, 0.5)
    with pytest.raises(ValueError, match=r"\['c'\]"):
        ema_update(teacher, teacher | {"c": torch.ones(1)}, 0.5)
    with pytest.raises(ValueError, match="moving average"):
        ema_update(teacher, teacher, 1.5)
    assert teacher["a"].item() == 0.0


def test_a_trust_region_mixes_logits():
    reference = torch.tensor([[0.0, 2.0]])
    student = torch.tensor([[4.0, -2.0]], requires_grad=True)
    mixed = trust_region_logits(reference, student, 0.25)
    assert mixed.tolist() == [[1.0, 1.0]]
    assert not mixed.requires_grad


def test_at_the_ends_the_other_side_does_not_matter():
    finite, masked = torch.tensor([[0.0, 2.0]]), torch.tensor([[1.0, -torch.inf]])
    assert trust_region_logits(finite, masked, 0.0).tolist() == [[0.0, 2.0]]
    assert trust_region_logits(masked, finite, 1.0).tolist() == [[0.0, 2.0]]


def test_bad_trust_regions():
    with pytest.raises(ValueError, match="alpha"):
        trust_region_logits(torch.zeros(1, 2), torch.zeros(1, 2), -0.1)
    with pytest.raises(ValueError, match="one shape"):
        trust_region_logits(torch.zeros(1, 2), torch.zeros(1, 3), 0.1)
