import math
from typing import Any

import pytest
import torch

from trainer.objectives.policy.gspo import GspoForm, gspo

NAN = float("nan")
OLD = torch.tensor([[-1.0, -1.0, NAN], [-2.0, NAN, NAN]])
NEW = torch.tensor([[-0.9, -0.7, NAN], [-2.0, NAN, NAN]])
MASK = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
ADVANTAGES = torch.tensor([[1.0, -2.0, NAN], [3.0, NAN, NAN]])
CLIP: dict[str, Any] = {"clip_low": 0.5, "clip_high": 0.5}


def run(form: GspoForm, **options):
    leaf = NEW.clone().requires_grad_()
    terms = gspo(leaf, OLD, ADVANTAGES, MASK, form=form, **(CLIP | options))
    (grad,) = torch.autograd.grad(terms.loss.sum(), leaf)
    return terms, grad


def test_both_forms_have_the_value_of_the_geometric_mean():
    ratio = math.exp(0.2)
    for form in ("token", "sequence"):
        terms, _ = run(form)
        expected = torch.tensor([[-ratio, 2 * ratio, 0.0], [-3.0, 0.0, 0.0]])
        torch.testing.assert_close(terms.loss.detach(), expected)


def test_gradient_is_of_the_own_token_or_of_the_mean():
    ratio = math.exp(0.2)
    terms, grad = run("token")
    torch.testing.assert_close(grad, torch.tensor([[-ratio, 2 * ratio, 0], [-3, 0, 0]]))
    torch.testing.assert_close(terms.kl, torch.tensor([[-0.1, -0.3, 0.0], [0.0, 0.0, 0.0]]))
    terms, grad = run("sequence")
    torch.testing.assert_close(grad, torch.tensor([[ratio / 2, ratio / 2, 0], [-3, 0, 0]]))
    torch.testing.assert_close(terms.kl[0, :2], torch.tensor([-0.2, -0.2]))


def test_a_turn_has_a_ratio_of_its_own_as_if_it_were_a_row():
    turn_ids = torch.tensor([[0, 1, -1], [2, -1, -1]])
    terms, _ = run("token", turn_ids_BT=turn_ids)
    torch.testing.assert_close(terms.ratio[0, :2], torch.tensor([0.1, 0.3]).exp())
    with pytest.raises(ValueError, match="no turn id"):
        run("token", turn_ids_BT=torch.full((2, 3), -1))


def test_log_ratio_is_clamped_at_ten_in_the_token_form_and_finite_in_both():
    mask, old = torch.ones(1, 2), torch.full((1, 2), -100.0)
    new = torch.zeros(1, 2)
    token = gspo(new, old, -mask, mask, **CLIP)
    assert token.ratio[0, 0].item() == pytest.approx(math.exp(10))
    sequence = gspo(new, old, -mask, mask, form="sequence", dual_clip=3.0, **CLIP)
    assert sequence.ratio[0, 0].item() == pytest.approx(math.exp(20))
    assert sequence.loss[0, 0].item() == 3.0


def test_unknown_form_is_refused():
    with pytest.raises(ValueError, match="token or sequence"):
        run("turn")  # pyright: ignore[reportArgumentType]
