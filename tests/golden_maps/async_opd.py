"""Estimators of asynchronous distillation: `asyncopd_estimators`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.golden_maps.check import (
    FLOAT32_INSIDE_TOLERANCE,
    Case,
    Comparison,
    GoldenMap,
    Meta,
)
from tests.trainer.live import support_logprobs
from trainer.objectives.batch import selected, token_weights, weighted_sum
from trainer.objectives.distributions.side_samples import (
    SurrogateTerms,
    side_sample_forward_kl,
    side_samples,
    stale_surrogate,
)
from trainer.objectives.distributions.sparse_kl import Direction, sparse_kl, sparse_policy_gradient
from trainer.objectives.policy.decoupled import decoupled_ppo
from trainer.objectives.policy.m2po import FLOOR_HIGH, FLOOR_LOW, m2po_clip

Values = Mapping[str, Any]


def estimators(case: Case, meta: Meta) -> Iterator[Comparison]:
    """Every output of a case, from the estimator that it names."""
    inputs, outputs = case["inputs"], case["outputs"]
    is_exact = "dense_reverse_kl_mean" in outputs
    if is_exact:
        ours = exact_expectation(inputs)
    elif not inputs:
        ours = empty_mask()
    else:
        ours = ESTIMATORS[case["fn"]](inputs, case["kwargs"])
    # The reference's code computes in float32 whatever the input's type; the analytic cases do not.
    tolerance = None if is_exact else FLOAT32_INSIDE_TOLERANCE
    yield from _compare("", ours, outputs, tolerance)


def multi_sample(inputs: Values, options: Values) -> Values:
    """The mean over m samples, and what each sample at mask 1 gave."""
    logits, mask = _leaf(inputs["current_logits"]), inputs["mask"].bool()
    terms = side_samples(
        support_logprobs(logits, inputs["sample_ids"].long()),
        inputs["old_logprobs"],
        inputs["teacher_logprobs"],
        mask.unsqueeze(-1),
        **_surrogate_options(options),
    )
    return {**_reduced(terms.loss_BT, logits, mask), **_samples(terms.samples, mask)}


def one_sample(inputs: Values, options: Values) -> Values:
    """The sampled token alone: clipped, decoupled or under a second-moment budget."""
    logits, mask = _leaf(inputs["current_logits"]), inputs["mask"].bool()
    logprobs = support_logprobs(logits, inputs["token_ids"].long().unsqueeze(-1)).squeeze(-1)
    old, teacher = (selected(inputs[name], mask) for name in ("old_logprobs", "teacher_logprobs"))
    logprobs = selected(logprobs, mask)
    choice = _surrogate_options(options)
    extra: dict[str, Any] = {}
    if options.get("m2po_budget") is not None:
        bounds, extra = _budgeted(logprobs.detach(), old, teacher, mask, choice, options)
        choice |= bounds
    # The reference takes the log-ratio in float32, so that whether a token at the very bound is
    # clipped depends on it; its bounds are of the input's type.
    now, old, teacher = logprobs.float(), old.float(), teacher.float()
    terms = stale_surrogate(now, old, teacher, **choice)
    loss = terms.loss
    if options.get("use_decoupled_loss") and choice["importance"]:
        # Ratio, clip and flags are against the proximal policy, the advantage is not.
        advantages, proximal = terms.advantages, selected(options["prox_logprobs"], mask).float()
        terms = replace(stale_surrogate(now, proximal, teacher, **choice), advantages=advantages)
        decoupled = decoupled_ppo(
            now,
            proximal,
            old,
            advantages,
            clip_low=choice["clip_low"],
            clip_high=choice["clip_high"],
            cap=_given(options, "behave_imp_weight_cap", 5.0),
        )
        loss = decoupled.ppo.loss
        extra["_behave_imp_weight"] = decoupled.weights[mask]
        extra["_behave_mask"] = (decoupled.weights[mask] > 0).to(now.dtype)
    stats = {f"_{name}": value for name, value in _samples(terms, mask).items()}
    stats |= {"_log_ratios": terms.ratio[mask].log(), **extra}
    return {**_reduced(loss, logits, mask), "stats": stats}


def _budgeted(
    logprobs: Tensor, old: Tensor, teacher: Tensor, mask: Tensor, choice: Values, options: Values
) -> tuple[dict[str, float], dict[str, Any]]:
    """The margins of this batch, and what the reference reports of them."""
    clip = m2po_clip(
        logprobs,
        old,
        stale_surrogate(logprobs, old, teacher, **choice).advantages,
        mask,
        budget=options["m2po_budget"],
        floor_low=_given(options, "m2po_miniclip_low", FLOOR_LOW),
        floor_high=_given(options, "m2po_miniclip_high", FLOOR_HIGH),
    )
    return {"clip_low": clip.clip_low, "clip_high": clip.clip_high}, {
        "m2po_clip_low": clip.clip_low,
        "m2po_clip_high": clip.clip_high,
        "m2po_m2_before": clip.moment_before,
        "m2po_m2_after": clip.moment_after,
    }


def multi_sample_forward(inputs: Values, options: Values) -> Values:
    """Samples of the teacher."""
    logits, mask = _leaf(inputs["current_logits"]), inputs["mask"].bool()
    loss = side_sample_forward_kl(
        support_logprobs(logits, inputs["sample_ids"].long()),
        inputs["teacher_logprobs"],
        mask.unsqueeze(-1),
    )
    return _reduced(loss, logits, mask)


def sparse(inputs: Values, options: Values, direction: Direction) -> Values:
    """A KL over a cache."""
    logits, mask = _leaf(inputs["current_logits"]), inputs["mask"].bool()
    terms = sparse_kl(
        support_logprobs(logits, inputs["support_ids"].long()),
        inputs["teacher_logprobs"],
        mask.unsqueeze(-1),
        direction=direction,
        **{name: options[name] for name in ("alpha", "token_clip") if name in options},
    )
    return _reduced(terms.loss, logits, mask)


def sparse_clipped(inputs: Values, options: Values) -> Values:
    """The clipped form with softmax weights."""
    logits, mask = _leaf(inputs["current_logits"]), inputs["mask"].bool()
    terms = sparse_policy_gradient(
        support_logprobs(logits, inputs["support_ids"].long()),
        inputs["old_logprobs"],
        inputs["teacher_logprobs"],
        mask.unsqueeze(-1),
        clip_low=options["clip_eps"],
        clip_high=options["clip_eps"],
        dual_clip=options["clip_ratio_c"],
    )
    return _reduced(terms.loss, logits, mask)


def exact_expectation(inputs: Values) -> Values:
    """Every token of the vocabulary as a sample, weighted by the old policy's probability."""
    mask = inputs["mask"].bool()
    everything = torch.arange(inputs["current_logits"].shape[-1]).expand_as(inputs["old_logits"])
    old = support_logprobs(inputs["old_logits"], everything)
    teacher = support_logprobs(inputs["teacher_logits"], everything)
    logits = _leaf(inputs["current_logits"])
    dense = sparse_kl(support_logprobs(logits, everything), teacher, direction="reverse")
    results = {"dense": _reduced(dense.loss, logits, mask)}
    for reference in ("current", "old"):
        logits = _leaf(inputs["current_logits"])
        terms = side_samples(
            support_logprobs(logits, everything),
            old,
            teacher,
            mask.unsqueeze(-1),
            advantage_reference=reference,
            sample_weights_BTM=old.exp(),
        )
        results[reference] = _reduced(terms.loss_BT, logits, mask)
    dense_grad, theta_grad, old_grad = (
        results[name]["grad_current_logits"] for name in ("dense", "current", "old")
    )
    return {
        "dense_reverse_kl_mean": results["dense"]["loss"],
        "grad_dense": dense_grad,
        "expected_surrogate_A_theta": results["current"]["loss"],
        "grad_A_theta": theta_grad,
        "max_abs_diff_A_theta_vs_dense": torch.dist(theta_grad, dense_grad, p=math.inf),
        "expected_surrogate_A_old": results["old"]["loss"],
        "grad_A_old": old_grad,
        "max_abs_diff_A_old_vs_dense": torch.dist(old_grad, dense_grad, p=math.inf),
    }


def empty_mask() -> Values:
    """A batch without tokens: a zero that can be differentiated."""
    logits = torch.zeros(1, 1, 2, requires_grad=True)
    mask = torch.zeros(1, 1, dtype=torch.bool)
    student = support_logprobs(logits, torch.zeros(1, 1, 1, dtype=torch.int64))
    terms = sparse_kl(student, student, mask.unsqueeze(-1), direction="reverse")
    return _reduced(terms.loss, logits, mask)


ESTIMATORS = {
    "multi_sample_policy_gradient_kl": multi_sample,
    "policy_gradient_kl": one_sample,
    "multi_sample_forward_kl": multi_sample_forward,
    "sparse_reverse_kl": partial(sparse, direction="reverse"),
    "sparse_forward_kl": partial(sparse, direction="forward"),
    "sparse_skewed_kl": partial(sparse, direction="skewed"),
    "thunlp_opd_default_loss": sparse_clipped,
}


def _compare(
    prefix: str, ours: Values, reference: Values, tolerance: float | None
) -> Iterator[Comparison]:
    for name, value in reference.items():
        if isinstance(value, Mapping):
            yield from _compare(f"{name}.", ours[name], value, tolerance)
        else:
            yield Comparison(
                name=f"{prefix}{name}", ours=ours[name], reference=value, tolerance=tolerance
            )


def _leaf(logits: Tensor) -> Tensor:
    return logits.clone().requires_grad_()


def _reduced(loss: Tensor, logits: Tensor, mask: Tensor) -> dict[str, Tensor]:
    mean = weighted_sum(loss, token_weights(mask.to(loss.dtype), "token-mean"))
    (grad,) = torch.autograd.grad(mean, logits)
    return {"loss": mean.detach(), "grad_current_logits": grad, "per_token": loss.detach()[mask]}


def _given(options: Values, name: str, default: Any) -> Any:
    """The reference's own default where a case names no value."""
    value = options.get(name)
    return default if value is None else value


def _surrogate_options(options: Values) -> dict[str, Any]:
    clip = _given(options, "clip_eps", 0.2)
    importance = _given(options, "use_importance_sampling", True)
    is_current = _given(options, "online_advantage", False) or not importance
    return {
        "advantage_reference": "current" if is_current else "old",
        "clip_low": clip,
        "clip_high": clip,
        "importance": importance,
    }


def _samples(terms: SurrogateTerms, mask: Tensor) -> dict[str, Tensor]:
    return {
        "ratios": terms.ratio[mask].flatten(),
        "advantages": terms.advantages[mask].flatten(),
        "clip_high": terms.above[mask].flatten(),
        "clip_low": terms.below[mask].flatten(),
    }


MAPS: dict[str, GoldenMap] = {"asyncopd_estimators": estimators}
