"""verl's policy losses and reductions: `verl091_policy_loss`, `verl091_agg_loss`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.golden_maps.check import (
    EMPTY_MASK,
    METRIC_TOLERANCE,
    Case,
    Comparison,
    Deliberate,
    Meta,
)
from tests.golden_maps.rollout_correction import compare_metrics
from trainer.objectives.batch import selected, token_weights, weighted_sum
from trainer.objectives.distributions.kl import kl_estimate
from trainer.objectives.policy.cispo import cispo
from trainer.objectives.policy.gspo import gspo
from trainer.objectives.policy.ppo import PpoTerms, ppo_clip, pure_is
from trainer.objectives.rollout_correction.config import settings_from_verl
from trainer.objectives.rollout_correction.correct import correct_rollout

GARBAGE = "ALGORITHMS 0.1: values at mask 0 reach no output"
DUAL_CLIP = 3.0
"""The reference's default."""


def policy_loss(case: Case, meta: Meta) -> Iterator[Comparison]:
    """Loss, gradient and each metric."""
    inputs, outputs = case["inputs"], case["outputs"]
    mask = inputs["response_mask"].to(inputs["log_prob"].dtype)
    leaf = inputs["log_prob"].clone().requires_grad_()
    values: dict[str, Any] = {
        name: selected(inputs[name], mask) for name in ("old_log_prob", "advantages")
    }
    values |= {"log_prob": selected(leaf, mask), "weights": inputs["rollout_is_weights"]}
    name = case["loss_fn"]
    metrics = dict(outputs["metrics"])
    if name == "bypass_mode":
        options = {**case["config"]["rollout_correction"], "bypass_mode": True}
        corrected = correct_rollout(
            values["log_prob"].detach(),
            values["old_log_prob"],
            mask,
            settings_from_verl(options, semantics="verl"),
        )
        mask, name = corrected.mask_BT, options.get("loss_type", "ppo_clip")
        values["weights"] = corrected.weights_BT
        of_correction = {
            metric: metrics.pop(metric) for metric in outputs["metrics"] if "rollout_corr" in metric
        }
        yield from compare_metrics(
            _as_correction(inputs, options, of_correction), corrected, "verl", ""
        )
    terms = LOSSES[name](values, mask, case["config"])
    loss = weighted_sum(terms.loss, token_weights(mask, case["loss_agg_mode"]))
    (grad,) = torch.autograd.grad(loss, leaf)
    ours = {"loss": loss.detach(), "grad_log_prob": grad}
    for output, mine in ours.items():
        zero = Deliberate(reason=EMPTY_MASK, expected=torch.zeros_like(mine))
        yield Comparison(
            name=output,
            ours=mine,
            reference=outputs[output],
            deliberate=None if mask.any() else zero,
        )
    measured = _actor_metrics(terms, mask)
    for metric, value in metrics.items():
        yield Comparison(
            name=metric, ours=measured[metric], reference=value, tolerance=METRIC_TOLERANCE
        )


def _as_correction(
    inputs: Mapping[str, Any], options: Mapping[str, Any], metrics: Mapping[str, Any]
) -> Case:
    """The case of rollout correction inside one of the bypass mode: old is the rollout policy."""
    return {
        "inputs": {
            "old_log_prob": inputs["log_prob"],
            "rollout_log_prob": inputs["old_log_prob"],
            "response_mask": inputs["response_mask"],
        },
        "kwargs": options,
        "outputs": {"metrics": metrics},
    }


def _actor_metrics(terms: PpoTerms, mask: Tensor) -> dict[str, float]:
    means = token_weights(mask, "token-mean")
    return {
        "actor/pg_clipfrac": float(weighted_sum(terms.clipped, means)),
        "actor/pg_clipfrac_lower": float(weighted_sum(terms.clipped_lower, means)),
        "actor/ppo_kl": float(weighted_sum(terms.kl, means)),
    }


def _vanilla(values: Mapping[str, Any], mask: Tensor, config: Mapping[str, Any]) -> PpoTerms:
    return ppo_clip(
        values["log_prob"],
        values["old_log_prob"],
        values["advantages"],
        dual_clip=config.get("clip_ratio_c", DUAL_CLIP),
        weights=values["weights"],
        **_clip(config),
    )


def _gspo(values: Mapping[str, Any], mask: Tensor, config: Mapping[str, Any]) -> PpoTerms:
    return gspo(
        values["log_prob"],
        values["old_log_prob"],
        values["advantages"],
        mask,
        weights=values["weights"],
        **_clip(config),
    )


def _cispo(values: Mapping[str, Any], mask: Tensor, config: Mapping[str, Any]) -> PpoTerms:
    return cispo(
        values["log_prob"],
        values["old_log_prob"],
        values["advantages"],
        weights=values["weights"],
        **_clip(config),
    )


def _reinforce(values: Mapping[str, Any], mask: Tensor, config: Mapping[str, Any]) -> PpoTerms:
    """Of the other terms the reference reports the KL alone, not clamped: nothing is exponentiated
    here.
    """
    loss = pure_is(values["log_prob"], values["advantages"], values["weights"])
    kl = kl_estimate("k1", values["old_log_prob"], values["log_prob"].detach())
    return replace(_vanilla(values, mask, config), loss=loss, kl=kl)


LOSSES = {
    "vanilla": _vanilla,
    "gspo": _gspo,
    "cispo": _cispo,
    "ppo_clip": _vanilla,
    "reinforce": _reinforce,
}
"""By `loss_fn`, and the last two by the `loss_type` of the bypass mode."""


def _clip(config: Mapping[str, Any]) -> dict[str, Any]:
    both = config.get("clip_ratio", 0.2)
    low, high = config.get("clip_ratio_low"), config.get("clip_ratio_high")
    return {
        "clip_low": both if low is None else low,
        "clip_high": both if high is None else high,
    }


def aggregation(case: Case, meta: Meta) -> Iterator[Comparison]:
    """One reduction of one matrix, and whether it is refused."""
    values, reference = case["inputs"]["loss_mat"], case["outputs"]
    mask = case["inputs"]["loss_mask"].to(values.dtype)
    kwargs = case["kwargs"]
    try:
        weights = token_weights(
            mask,
            case["mode"],
            num_tokens=kwargs.get("batch_num_tokens"),
            num_sequences=kwargs.get("global_batch_size"),
            horizon=kwargs.get("loss_scale_factor"),
            dp_size=kwargs.get("dp_size", 1),
        )
    except ValueError:
        yield Comparison(name="error", ours="ValueError", reference=_kind(reference["error"]))
        return
    yield Comparison(name="error", ours=None, reference=_kind(reference["error"]))
    ours = weighted_sum(values, weights)
    deliberate = None
    if not mask.any():
        deliberate = Deliberate(reason=EMPTY_MASK, expected=torch.zeros_like(ours))
    elif not torch.isfinite(values).all():
        clean = weighted_sum(selected(values, mask), weights)
        deliberate = Deliberate(reason=GARBAGE, expected=clean)
    yield Comparison(name="loss", ours=ours, reference=reference["loss"], deliberate=deliberate)


def _kind(error: str | None) -> str | None:
    """The class of an error that is written as `Class: message` or as its class alone."""
    return None if error is None else error.split(":")[0].split("(")[0].strip()
