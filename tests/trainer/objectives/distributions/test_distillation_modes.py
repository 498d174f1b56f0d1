import dataclasses

import pytest
import torch

from tests.trainer.objectives.every_objective import random_batch
from trainer.objectives.aggregate import token_weights, weighted_sum
from trainer.objectives.distributions.distillation_modes import (
    DistillationSettings,
    distillation_metrics,
    distillation_terms,
    estimator_divergence,
    total_loss,
)
from trainer.objectives.options import HindsightOpd, ObjectiveOptions, SupervisedOpd
from trainer.objectives.registry import objective_terms

NAN = float("nan")
K1 = DistillationSettings(loss_mode="k1", use_policy_gradient=True)
MASK = torch.tensor([[1.0, 1.0, 0.0]], dtype=torch.float64)
TEACHER = torch.tensor([[-0.7, -0.2, NAN]], dtype=torch.float64)
OLD = torch.tensor([[-0.5, -1.0, NAN]], dtype=torch.float64)


def student() -> torch.Tensor:
    return torch.tensor([[-0.5, -1.0, NAN]], dtype=torch.float64, requires_grad=True)


def run(settings: DistillationSettings, teacher=TEACHER, old=OLD, mask=MASK, correction=None):
    logprobs = student()
    divergence = estimator_divergence(settings.loss_mode, logprobs, teacher, mask)
    terms = distillation_terms(
        divergence, logprobs, old, mask, settings, rollout_weights_BT=correction
    )
    weights = token_weights(mask, "token-mean")
    loss = weighted_sum(terms.loss, weights)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss, gradient, terms, distillation_metrics(terms, mask, weights, is_estimator=True)


def test_defaults_are_those_of_the_yaml_file():
    settings = DistillationSettings()
    assert (settings.loss_mode, settings.use_policy_gradient, settings.coef) == ("k3", False, 1.0)
    assert (settings.use_task_rewards, settings.loss_max_clamp) == (True, None)
    assert (settings.clip_low, settings.clip_high) == (0.2, 0.2)


def test_supervised_k3_has_the_worked_values_and_gradients():
    loss, gradient, terms, metrics = run(DistillationSettings())
    torch.testing.assert_close(
        terms.divergence, torch.tensor([[0.018731, 0.425541, 0.0]]).double(), atol=1e-6, rtol=0
    )
    expected = torch.tensor([[0.181269, -1.225541, 0.0]], dtype=torch.float64) / 2
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=0)
    assert loss.item() == pytest.approx((0.018731 + 0.425541) / 2, abs=1e-6)
    assert set(metrics) == {"loss", "loss_min", "loss_max", "abs_loss"}
    assert terms.advantages.isnan().all()


def test_policy_gradient_of_k1_pushes_towards_the_teacher():
    loss, gradient, terms, metrics = run(K1)
    torch.testing.assert_close(terms.advantages[:, :2], (TEACHER - OLD)[:, :2])
    # At ratio 1 the gradient is -A over the number of tokens.
    torch.testing.assert_close(gradient, torch.tensor([[0.1, -0.4, 0.0]], dtype=torch.float64))
    assert loss.item() == pytest.approx(-0.3)
    assert metrics["abs_loss"].item() == pytest.approx(0.5)
    assert {"pg_clipfrac", "ppo_kl", "pg_clipfrac_lower"} < set(metrics)


def test_extremes_are_taken_before_the_clamp_and_clamping_stops_the_gradient():
    _, gradient, terms, metrics = run(DistillationSettings(loss_mode="k2", loss_max_clamp=0.1))
    assert metrics["loss_max"].item() == pytest.approx(0.32)
    assert metrics["loss_min"].item() == pytest.approx(0.02)
    assert terms.loss[0, 1].item() == pytest.approx(0.1)
    assert gradient[0, 1].item() == 0.0
    _, gradient, terms, _ = run(dataclasses.replace(K1, loss_max_clamp=0.1))
    assert terms.advantages[0, 1].item() == pytest.approx(0.1)
    assert gradient[0, 1].item() == pytest.approx(-0.05)


def test_dual_clip_and_detached_weights_act_on_the_policy_gradient_only():
    old = torch.tensor([[-2.5, -1.0, NAN]], dtype=torch.float64)
    _, gradient, terms, metrics = run(K1, old=old)
    assert terms.loss[0, 0].item() == pytest.approx(0.2 * 3.0)
    assert gradient[0, 0].item() == 0.0
    assert metrics["pg_clipfrac_lower"].item() == pytest.approx(0.5)
    correction = torch.tensor([[0.5, 2.0, NAN]], dtype=torch.float64)
    assert run(K1, correction=correction)[0].item() == pytest.approx((0.1 - 1.6) / 2)
    supervised = DistillationSettings(loss_mode="k2")
    plain, weighted = run(supervised), run(supervised, correction=correction)
    assert weighted[0].item() == plain[0].item()


def test_a_teacher_equal_to_the_student_teaches_nothing():
    for settings in (DistillationSettings(), DistillationSettings(loss_mode="k2"), K1):
        loss, gradient, _, metrics = run(settings, teacher=OLD)
        assert loss.item() == metrics["loss_max"].item() == 0.0
        assert not gradient.any()


def test_coefficient_acts_beside_task_rewards_only():
    one, task = torch.tensor(1.0), torch.tensor(10.0)
    settings = DistillationSettings(coef=1.5)
    assert total_loss(one, task, settings).item() == 11.5
    alone = dataclasses.replace(settings, use_task_rewards=False)
    assert total_loss(one, task, alone).item() == 1.0
    with pytest.raises(ValueError, match="no task loss"):
        total_loss(one, None, settings)


def test_an_empty_mask_gives_a_differentiable_zero_and_missing_extremes():
    loss, gradient, _, metrics = run(K1, mask=torch.zeros_like(MASK))
    assert loss.item() == 0.0
    assert not gradient.any()
    assert metrics["loss_min"].isnan()
    assert metrics["abs_loss"].isnan()


def by_name(estimator: str, limit: float | None, use_policy_gradient: bool) -> ObjectiveOptions:
    """The same mode as a configuration selects it."""
    if not use_policy_gradient:
        return SupervisedOpd(name="supervised_opd", estimator=estimator, loss_max_clamp=limit)
    return HindsightOpd(
        estimator=estimator,
        loss_max_clamp=limit,
        advantage_reference="current",
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=3.0,
    )


@pytest.mark.parametrize("limit", [None, 0.1])
@pytest.mark.parametrize(
    ("estimator", "use_policy_gradient"),
    [(name, False) for name in ("abs", "k2", "k3", "k1+", "k3+")]
    + [(name, True) for name in ("k1", "abs", "k3")],
)
def test_the_selected_objective_is_this_mode(estimator, use_policy_gradient, limit):
    """What golden vectors say of these modes they say of the objectives that a run trains with."""
    batch = random_batch(3)
    logprobs = batch.logprobs_BT.clone().requires_grad_()
    taught = torch.ones_like(batch.mask_BT)
    batch = dataclasses.replace(
        batch,
        logprobs_BT=logprobs,
        logprobs_sampled_BT=logprobs,
        old_logprobs_sampled_BT=batch.old_logprobs_BT,
        opd_valid_BT=taught,
        weights_BT=taught,
    )
    settings = DistillationSettings(
        loss_mode=estimator, use_policy_gradient=use_policy_gradient, loss_max_clamp=limit
    )
    wanted = distillation_terms(
        estimator_divergence(estimator, logprobs, batch.teacher_logprobs_BT, batch.mask_BT),
        logprobs,
        batch.old_logprobs_BT,
        batch.mask_BT,
        settings,
    ).loss
    found = objective_terms(batch, by_name(estimator, limit, use_policy_gradient)).loss_BT
    found = found * batch.mask_BT
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    (one,) = torch.autograd.grad(wanted.sum(), logprobs, retain_graph=True)
    (other,) = torch.autograd.grad(found.sum(), logprobs)
    torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)
