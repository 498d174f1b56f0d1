"""Rollout correction: `seed_rollout_correction_418f`, `verl091_rollout_correction`.

Each value is compared with ours under the options that mean the same: verl's direction of k1 bounds
and clamping before the sum for verl, `*_raw` for the page's code, which measured before truncation.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.golden_maps.check import (
    K3_CHI2_TOLERANCE,
    METRIC_TOLERANCE,
    Case,
    Comparison,
    Deliberate,
    GoldenMap,
    Meta,
    same,
)
from tests.golden_maps.rollout_correction_rows import reference_reading, without_empty_rows
from trainer.objectives.rollout_correction.config import Semantics, settings_from_verl
from trainer.objectives.rollout_correction.correct import CorrectionResult, correct_rollout
from trainer.objectives.rollout_correction.settings import STATISTIC_ALIASES

EMPTY_ROWS = "ALGORITHMS 4.6: empty rows count nowhere"
NOT_FINITE = "ALGORITHMS 0.1: a trainer log-prob that is not finite drops its token"
EMPTY_BATCH = "ALGORITHMS 0.1: an empty batch is reported, not an error"
NO_THRESHOLD = "ALGORITHMS 4.5: rejection without a threshold is an error"
K3_CLAMPED = "ALGORITHMS 4.6: k3 clamps before it exponentiates"
NO_WEIGHT_LEFT = "ALGORITHMS 4.6: weights that are all 0 have an effective sample size of 0"
PAGE_NAMES = "ALGORITHMS 4.3: the page's names of rules are valid too"
K1_DIRECTION = "ALGORITHMS 4.3: bounds are on trainer over rollout"
CANCELLATION = "ALGORITHMS 4.6: mean(w^2) - mean(w)^2 cancels in float32, ours is centred"


def _compare(case: Case, meta: Meta, *, semantics: Semantics, suffix: str) -> Iterator[Comparison]:
    """`suffix` is what our metrics of weights have where both kinds exist."""
    inputs, reference = case["inputs"], case["outputs"]
    try:
        ours = _correct(case, semantics)
    except ValueError:
        ours = None
    error = None if ours is not None else "ValueError"
    reason = _why_errors_differ(case, semantics)
    yield Comparison(
        name="error",
        ours=error,
        reference=reference["error"],
        deliberate=None if reason is None else Deliberate(reason=reason, expected=error),
    )
    if ours is None or reference["error"] is not None:
        return
    if not torch.isfinite(inputs["old_log_prob"][inputs["response_mask"] > 0]).all():
        yield from _compare_without_broken(case, ours, semantics, suffix)
        return
    yield Comparison(
        name="weights", ours=ours.weights_BT, reference=reference["rollout_is_weights"]
    )
    yield Comparison(name="mask", ours=ours.mask_BT, reference=reference["modified_response_mask"])
    yield from compare_metrics(case, ours, semantics, suffix)
    yield from _compare_direction(case, semantics)


def _why_errors_differ(case: Case, semantics: Semantics) -> str | None:
    """The reason where one of us reports an error and the other need not."""
    kwargs = case["kwargs"]
    names = str(kwargs.get("rollout_rs")).replace(" ", "").split(",")
    if case["outputs"]["error"] == "ZeroDivisionError":
        return NO_WEIGHT_LEFT
    if not case["inputs"]["response_mask"].any():
        return EMPTY_BATCH
    if semantics == "verl" and any(name in STATISTIC_ALIASES for name in names):
        return PAGE_NAMES
    if semantics == "page" and "rollout_rs" in kwargs and "rollout_rs_threshold" not in kwargs:
        return NO_THRESHOLD
    return None


def _correct(case: Case, semantics: Semantics, **inputs: Any) -> CorrectionResult:
    inputs = {**case["inputs"], **inputs}
    return correct_rollout(
        inputs["old_log_prob"],
        inputs["rollout_log_prob"],
        inputs["response_mask"],
        settings_from_verl(case["kwargs"], semantics=semantics),
    )


def _select(metrics: dict[str, float], names: dict[str, Any], suffix: str) -> dict[str, float]:
    """Ours by the reference's names, NaN where there is none."""
    return {name: metrics.get(name + suffix, metrics.get(name, float("nan"))) for name in names}


def _tolerance(name: str) -> float:
    return K3_CHI2_TOLERANCE if "k3" in name or "chi2" in name else METRIC_TOLERANCE


def compare_metrics(
    case: Case, ours: CorrectionResult, semantics: Semantics, suffix: str
) -> Iterator[Comparison]:
    """One by one; with empty rows also as the reference reads them.

    `case` needs `inputs`, `kwargs` by verl's names and the metrics among its `outputs`.
    """
    reference = case["outputs"]["metrics"]
    read = dict.fromkeys(reference, ours)
    if (case["inputs"]["response_mask"].sum(dim=-1) == 0).any():
        yield from _compare_empty_rows(case, ours, semantics, suffix)
        read = reference_reading(case, ours, partial(_correct, case, semantics))
    doubled = {
        name: tensor.to(torch.float64)
        for name, tensor in case["inputs"].items()
        if isinstance(tensor, torch.Tensor)
    }
    exact = _correct(case, semantics, **doubled)
    # A weight that the other precision zeroes makes another deviation altogether.
    exact = exact if same(ours.weights_BT, exact.weights_BT, METRIC_TOLERANCE) else ours
    exact_metrics = _select(exact.metrics, reference, suffix)
    for name, value in reference.items():
        mine = _select(read[name].metrics, {name: value}, suffix)[name]
        deliberate = None
        if name.endswith("k3_kl"):
            deliberate = Deliberate(reason=K3_CLAMPED, expected=_token_k3(case))
        elif name.endswith("std") and not name.endswith("seq_std"):
            deliberate = Deliberate(reason=CANCELLATION, expected=exact_metrics[name])
        yield Comparison(
            name=name, ours=mine, reference=value, tolerance=_tolerance(name), deliberate=deliberate
        )


def _token_k3(case: Case) -> float:
    """The mean of k3, by way of the rule that rejects by it."""
    rule = {"rollout_rs": "token_k3", "rollout_rs_threshold": 1.0}
    metrics = _correct({**case, "kwargs": rule}, "page").metrics
    return metrics["rollout_corr/rollout_rs_token_k3_mean"]


def _compare_empty_rows(
    case: Case, ours: CorrectionResult, semantics: Semantics, suffix: str
) -> Iterator[Comparison]:
    """All metrics at once, against the same batch without its empty rows."""
    reference = case["outputs"]["metrics"]
    rest = _correct(case, semantics, **without_empty_rows(case))
    yield Comparison(
        name="metrics without empty rows",
        ours=_select(ours.metrics, reference, suffix),
        reference=reference,
        tolerance=K3_CHI2_TOLERANCE,
        deliberate=Deliberate(reason=EMPTY_ROWS, expected=_select(rest.metrics, reference, suffix)),
    )


def _compare_without_broken(
    case: Case, ours: CorrectionResult, semantics: Semantics, suffix: str
) -> Iterator[Comparison]:
    """Against the same batch with mask 0 at the tokens whose trainer log-prob is not finite."""
    reference, inputs = case["outputs"], case["inputs"]
    mask = inputs["response_mask"]
    mask = torch.where(torch.isfinite(inputs["old_log_prob"]), mask, torch.zeros_like(mask))
    masked = _correct(case, semantics, response_mask=mask)
    names = reference["metrics"]
    for name, mine, theirs, expected in (
        ("weights", ours.weights_BT, reference["rollout_is_weights"], masked.weights_BT),
        ("mask", ours.mask_BT, reference["modified_response_mask"], masked.mask_BT),
        (
            "metrics",
            _select(ours.metrics, names, suffix),
            names,
            _select(masked.metrics, names, suffix),
        ),
    ):
        deliberate = Deliberate(reason=NOT_FINITE, expected=expected)
        yield Comparison(name=name, ours=mine, reference=theirs, deliberate=deliberate)


def _compare_direction(case: Case, semantics: Semantics) -> Iterator[Comparison]:
    """The mask under the page's bounds, for a single rule by verl's name, against the page's name
    of the same rule with both bounds.
    """
    name = case["kwargs"].get("rollout_rs")
    aliases = {statistic: alias for alias, statistic in STATISTIC_ALIASES.items()}
    if semantics != "verl" or name not in aliases:
        return
    (rule,) = settings_from_verl(case["kwargs"]).rejections
    bounds = {"rollout_rs_threshold": rule.upper, "rollout_rs_threshold_lower": rule.lower}
    page = {**case, "kwargs": {"rollout_rs": aliases[name], **bounds}}
    yield Comparison(
        name="mask under bounds on trainer over rollout",
        ours=_correct(case, "page").mask_BT,
        reference=case["outputs"]["modified_response_mask"],
        deliberate=Deliberate(reason=K1_DIRECTION, expected=_correct(page, "page").mask_BT),
    )


MAPS: dict[str, GoldenMap] = {
    "seed_rollout_correction_418f": partial(_compare, semantics="page", suffix="_raw"),
    "verl091_rollout_correction": partial(_compare, semantics="verl", suffix=""),
}
