import math

import pytest
import torch

from trainer.objectives.distributions.side_samples import (
    draw_side_samples,
    side_sample_forward_kl,
    side_samples,
    stale_surrogate,
)


def logs(*probabilities):
    return torch.tensor(probabilities, dtype=torch.float64).log()


OLD, CURRENT, TEACHER = logs(0.6, 0.3, 0.1), logs(0.5, 0.25, 0.25), logs(0.7, 0.2, 0.1)
SAMPLES = torch.tensor([0, 1])


def test_worked_two_samples():
    terms = side_samples(CURRENT[SAMPLES], OLD[SAMPLES], TEACHER[SAMPLES])
    assert terms.loss_BT.item() == pytest.approx(-0.0472203, abs=1e-7)
    assert terms.samples.ratio.tolist() == pytest.approx([5 / 6, 5 / 6])
    assert terms.samples.advantages.tolist() == pytest.approx([0.336472, -0.223144], abs=1e-6)


@pytest.mark.parametrize(("reference", "expected"), [("current", 0.1166225), ("old", 0.0242909)])
def test_worked_exact_expectation(reference, expected):
    terms = side_samples(
        CURRENT, OLD, TEACHER, advantage_reference=reference, sample_weights_BTM=OLD.exp()
    )
    assert terms.loss_BT.item() == pytest.approx(expected, abs=1e-7)


def test_worked_ablation_with_old_advantage_and_clip():
    terms = side_samples(
        CURRENT[SAMPLES],
        OLD[SAMPLES],
        TEACHER[SAMPLES],
        advantage_reference="old",
        clip_low=0.2,
        clip_high=0.2,
    )
    assert terms.loss_BT.item() == pytest.approx(0.1047143, abs=1e-7)


def expected_gradient(reference):
    logits = CURRENT.clone().requires_grad_()
    side_samples(
        torch.log_softmax(logits, dim=-1),
        OLD,
        TEACHER,
        advantage_reference=reference,
        sample_weights_BTM=OLD.exp(),
    ).loss_BT.backward()
    assert logits.grad is not None
    return logits.grad


def test_only_the_current_advantage_gives_the_gradient_of_the_reverse_kl():
    logits = CURRENT.clone().requires_grad_()
    logprobs = torch.log_softmax(logits, dim=-1)
    (logprobs.exp() * (logprobs - TEACHER)).sum().backward()
    assert logits.grad is not None
    torch.testing.assert_close(expected_gradient("current"), logits.grad)
    assert (expected_gradient("old") - logits.grad).abs().max() > 0.01


def test_without_importance_the_ratio_is_one_and_the_gradient_stays():
    logprobs = CURRENT.clone().requires_grad_()
    terms = stale_surrogate(logprobs, OLD, TEACHER, importance=False, clip_low=0.2, clip_high=0.2)
    terms.loss.sum().backward()
    assert terms.ratio.tolist() == [1.0, 1.0, 1.0]
    torch.testing.assert_close(logprobs.grad, CURRENT - TEACHER)
    old = stale_surrogate(CURRENT, OLD, TEACHER, importance=False, advantage_reference="old")
    torch.testing.assert_close(old.advantages, TEACHER - OLD)


def test_flags_tell_which_side_of_the_clip():
    old = torch.full((4,), -2.0)
    ratios = torch.tensor([1.5, 0.5, 1.1, 1.5])
    teacher = torch.tensor([-1.0, -3.0, -1.0, -9.0])
    terms = stale_surrogate(old + ratios.log(), old, teacher, clip_low=0.2, clip_high=0.28)
    assert terms.above.tolist() == [1.0, 0.0, 0.0, 1.0]
    assert terms.below.tolist() == [0.0, 1.0, 0.0, 0.0]
    unclipped = stale_surrogate(old + ratios.log(), old, teacher)
    assert not unclipped.above.any()
    assert not unclipped.below.any()


def test_extreme_ratios_stay_finite():
    logprobs = torch.tensor([-0.1, -200.0], requires_grad=True)
    terms = stale_surrogate(logprobs, torch.tensor([-200.0, -0.1]), torch.tensor([-1.0, -1.0]))
    terms.loss.sum().backward()
    assert torch.isfinite(terms.loss).all()
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()
    assert terms.ratio.log().tolist() == pytest.approx([20.0, -20.0])


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_samples_that_are_not_valid_change_nothing(garbage):
    valid = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    values = [x[[0, 1, 2]].repeat(2, 1) for x in (CURRENT, OLD, TEACHER)]
    for tensor in values:
        tensor[valid == 0] = garbage
    current, old, teacher = values
    current.requires_grad_()
    terms = side_samples(current, old, teacher, valid)
    forward = side_sample_forward_kl(current, teacher, valid)
    (terms.loss_BT.sum() + forward.sum()).backward()
    assert terms.loss_BT.tolist() == pytest.approx([-0.0472203, 0.0], abs=1e-7)
    assert forward.tolist() == pytest.approx([(0.336472 - 0.223144) / 2, 0.0], abs=1e-6)
    assert current.grad is not None
    assert torch.isfinite(current.grad).all()
    assert (current.grad[valid == 0] == 0).all()


def test_forward_kl_over_the_teachers_distribution_is_exact():
    logprobs = CURRENT.clone().requires_grad_()
    value = side_sample_forward_kl(logprobs, TEACHER, sample_weights_BTM=TEACHER.exp())
    value.backward()
    assert value.item() == pytest.approx((TEACHER.exp() * (TEACHER - CURRENT)).sum().item())
    torch.testing.assert_close(logprobs.grad, -TEACHER.exp())


def test_variance_falls_with_the_number_of_samples():
    generator = torch.Generator().manual_seed(5)
    drawn = draw_side_samples(OLD.repeat(4000, 1), 16, generator=generator)
    losses = [
        side_samples(
            CURRENT[drawn.ids[:, :m]], OLD[drawn.ids[:, :m]], TEACHER[drawn.ids[:, :m]]
        ).loss_BT
        for m in (1, 16)
    ]
    assert (losses[1].var() / losses[0].var()).item() == pytest.approx(1 / 16, rel=0.15)
    assert losses[1].mean().item() == pytest.approx(0.1166225, abs=0.01)


def test_drawn_with_replacement_from_the_distribution_with_its_logprobs():
    generator = torch.Generator().manual_seed(7)
    logits = torch.stack([OLD + 3.0, TEACHER]).float()
    drawn = draw_side_samples(logits, 40_000, generator=generator)
    for row, logprobs in enumerate((OLD, TEACHER)):
        shares = torch.bincount(drawn.ids[row], minlength=3) / 40_000
        torch.testing.assert_close(shares, logprobs.exp().float(), atol=0.01, rtol=0)
        torch.testing.assert_close(drawn.logprobs[row], logprobs.float()[drawn.ids[row]])


def test_drawing_repeats_with_the_same_generator_and_skips_what_is_masked():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1))
    logits[0, 1] = math.nan
    logits[1, :, 2] = -math.inf
    mask = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
    first, second = (
        draw_side_samples(logits, 50, mask=mask, generator=torch.Generator().manual_seed(9))
        for _ in range(2)
    )
    assert torch.equal(first.ids, second.ids)
    assert first.ids.shape == first.logprobs.shape == (2, 3, 50)
    assert torch.isnan(first.logprobs[0, 1]).all()
    assert torch.isfinite(first.logprobs[mask > 0]).all()
    assert not (first.ids[1] == 2).any()


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="advantage_reference"):
        stale_surrogate(
            OLD,
            OLD,
            OLD,
            advantage_reference="online",  # pyright: ignore[reportArgumentType]
        )
    with pytest.raises(ValueError, match="at least one sample"):
        draw_side_samples(OLD, 0)
    with pytest.raises(ValueError, match="not finite"):
        draw_side_samples(torch.tensor([0.0, math.nan]), 1)
    with pytest.raises(ValueError, match="one mask entry per position"):
        draw_side_samples(torch.zeros(4, 3), 1, mask=torch.ones(2))
