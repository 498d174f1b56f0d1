import dataclasses

import pytest
import torch

from tests.trainer.golden import cases
from trainer.errors import ObjectiveNeedsError
from trainer.objectives.opd import OpdSettings, TokenBatch, hindsight_opd_loss
from trainer.objectives.registry import OBJECTIVES, select_objective

NAN = float("nan")


def token_batch(
    current, old, reference, teacher, rollout, turn_ids, sampled=None, old_sampled=None
) -> TokenBatch:
    mask = (turn_ids >= 0).float()
    return TokenBatch(
        logprobs_BT=current,
        logprobs_sampled_BT=current if sampled is None else sampled,
        old_logprobs_BT=old,
        old_logprobs_sampled_BT=old if old_sampled is None else old_sampled,
        reference_logprobs_BT=reference,
        teacher_logprobs_BT=teacher,
        rollout_logprobs_BT=rollout,
        entropy_BT=torch.zeros_like(old),
        mask_BT=mask,
        turn_ids_BT=turn_ids,
    )


def worked(**changes) -> TokenBatch:
    values = {
        "current": torch.tensor([[-0.2, -1.3]], requires_grad=True),
        "old": torch.tensor([[-0.5, -1.0]]),
        "reference": torch.tensor([[-0.4, -1.2]]),
        "teacher": torch.tensor([[-0.2, -2.0]]),
        "rollout": torch.tensor([[-0.5, -1.0]]),
        "turn_ids": torch.tensor([[0, 0]]),
    }
    return token_batch(**(values | changes))


@pytest.mark.parametrize("case", cases("openclaw_combine_loss"))
def test_loss_gradient_and_reports_of_openclaw(case):
    inputs, config, outputs = case["inputs"], case["config"], case["outputs"]
    logits = inputs["logits"].requires_grad_()
    tokens = torch.tensor(inputs["tokens_packed"])
    lengths = zip(inputs["total_lengths"], inputs["response_lengths"], strict=True)
    rows, targets, turn_ids, end = [], [], [], 0
    for turn, (total, response) in enumerate(lengths):
        end += total
        rows += range(end - response - 1, end - 1)
        targets += tokens[end - response : end].tolist()
        turn_ids += [turn] * response
    logprob_rows = torch.log_softmax(logits, dim=-1)[rows]
    current = logprob_rows.gather(-1, torch.tensor(targets).unsqueeze(-1)).T
    torch.testing.assert_close(current[0].detach(), inputs["new_log_probs"], atol=2e-5, rtol=2e-5)
    entropy = -(logprob_rows.exp() * logprob_rows).sum(-1).unsqueeze(0)
    batch = token_batch(
        current,
        inputs["old_log_probs"].unsqueeze(0),
        inputs["ref_log_probs"].unsqueeze(0),
        inputs["teacher_log_probs"].unsqueeze(0),
        inputs["rollout_log_probs"].unsqueeze(0),
        torch.tensor([turn_ids]),
    )
    settings = OpdSettings(
        clip_low=config["eps_clip"],
        clip_high=config["eps_clip_high"],
        tis_cap=None,
        beta_kl=config["kl_loss_coef"],
        kl_type=config["kl_loss_type"],
        beta_entropy=config["entropy_coef"],
    )
    # The reference sums over samples and divides by the batch size outside.
    result = hindsight_opd_loss(dataclasses.replace(batch, entropy_BT=entropy), settings, 1)
    result.loss.backward()
    torch.testing.assert_close(result.loss.detach(), outputs["loss"], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(logits.grad, outputs["grad_logits"], atol=2e-5, rtol=2e-5)
    for name, expected in outputs["reported"].items():
        assert result.reduced[name].item() == pytest.approx(expected.item(), abs=1e-4), name


def test_worked_numbers():
    batch = worked()
    result = hindsight_opd_loss(batch, OpdSettings())
    assert result.loss.item() == pytest.approx(0.208239, abs=1e-5)
    torch.testing.assert_close(result.advantages_BT, torch.tensor([[0.3, -1.0]]))
    assert result.reduced["kl_loss"].item() == pytest.approx((0.018731 + 0.005171) / 2, abs=1e-5)


def test_nan_outside_the_mask_reaches_nothing():
    padded = {
        name: torch.tensor([[NAN, *row, NAN]])
        for name, row in {
            "old": (-0.5, -1.0),
            "reference": (-0.4, -1.2),
            "teacher": (-0.2, -2.0),
            "rollout": (-0.5, -1.0),
        }.items()
    }
    current = torch.tensor([[NAN, -0.2, -1.3, NAN]], requires_grad=True)
    batch = token_batch(current=current, turn_ids=torch.tensor([[-1, 0, 0, -1]]), **padded)
    result = hindsight_opd_loss(batch, OpdSettings())
    result.loss.backward()
    assert result.loss.item() == pytest.approx(0.208239, abs=1e-5)
    assert current.grad is not None
    assert torch.isfinite(current.grad).all()
    assert current.grad[0, 0].item() == current.grad[0, 3].item() == 0.0
    assert all(torch.isfinite(value) for value in result.reduced.values())


def test_a_nonfinite_trainer_value_drops_its_token_and_is_counted():
    current = torch.tensor([[-0.2, -float("inf")]], requires_grad=True)
    result = hindsight_opd_loss(worked(current=current), OpdSettings())
    result.loss.backward()
    assert result.token_sums["nonfinite"].item() == 1
    assert result.token_sums["tokens"].item() == 1
    assert result.loss.item() == pytest.approx(-0.384 + 0.02 * 0.018731, abs=1e-5)
    assert current.grad is not None
    assert current.grad[0, 1].item() == 0.0


def test_a_nonfinite_teacher_value_is_refused():
    with pytest.raises(ValueError, match="teacher"):
        hindsight_opd_loss(worked(teacher=torch.tensor([[-0.2, NAN]])), OpdSettings())


def test_an_empty_batch_gives_a_differentiable_zero():
    batch = worked(turn_ids=torch.tensor([[-1, -1]]))
    result = hindsight_opd_loss(batch, OpdSettings())
    result.loss.backward()
    assert result.loss.item() == 0.0
    assert result.num_turns == 0


def test_stale_tokens_are_weighted_and_the_weight_is_capped_and_detached():
    rollout = torch.tensor([[-0.7, -3.0]])
    plain = hindsight_opd_loss(worked(), OpdSettings(tis_cap=None, beta_kl=0.0))
    batch = worked(rollout=rollout)
    result = hindsight_opd_loss(batch, OpdSettings(beta_kl=0.0))
    weight = torch.tensor([0.2]).exp().item()
    assert result.loss.item() == pytest.approx((-0.384 * weight + 0.8 * 2.0) / 2, abs=1e-5)
    assert plain.loss.item() == pytest.approx((-0.384 + 0.8) / 2, abs=1e-5)
    assert result.reduced["tis_clipfrac"].item() == pytest.approx(0.5)
    assert "tis" not in plain.reduced


def test_incomparable_rollout_logprobs_weigh_one():
    result = hindsight_opd_loss(worked(rollout=torch.tensor([[NAN, NAN]])), OpdSettings())
    assert result.loss.item() == pytest.approx(0.208239, abs=1e-5)
    assert result.reduced["train_rollout_logprob_abs_diff"].item() == 0.0


def test_advantage_at_temperature_one_and_ratio_at_the_samples():
    batch = worked(sampled=torch.tensor([[-0.1, -0.9]]), old_sampled=torch.tensor([[-0.3, -0.8]]))
    result = hindsight_opd_loss(batch, OpdSettings(tis_cap=None, beta_kl=0.0))
    ratios = torch.tensor([0.2, -0.1]).exp()
    expected = (-0.3 * ratios[0] + 1.0 * ratios[1]) / 2
    assert result.loss.item() == pytest.approx(expected.item(), abs=1e-5)


def test_current_as_advantage_reference():
    result = hindsight_opd_loss(worked(), OpdSettings(advantage_reference="current"))
    torch.testing.assert_close(result.advantages_BT, torch.tensor([[0.0, -0.7]]))


def test_every_promised_metric_is_reported():
    for settings in (OpdSettings(), OpdSettings(beta_kl=0.0, tis_cap=None)):
        result = hindsight_opd_loss(
            worked() if settings.beta_kl else worked(reference=None), settings
        )
        assert set(result.reduced) == OBJECTIVES["hindsight_opd"].reduced_keys(settings)


def test_missing_reference_and_needs_are_refused():
    with pytest.raises(ValueError, match="reference"):
        hindsight_opd_loss(worked(reference=None), OpdSettings())
    with pytest.raises(ObjectiveNeedsError, match="teacher_scalar"):
        select_objective("hindsight_opd", frozenset())
    with pytest.raises(ValueError, match="unknown objective"):
        select_objective("sft", frozenset({"teacher_scalar"}))
