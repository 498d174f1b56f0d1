"""Empty rows in golden files of rollout correction: the batch without them, and with the tokens by
which the references read them.

The references count an empty row in averages over rows: as one whose log-probs and log-ratio are 0,
or, in averages of weights over rows, as one whose weight is 0. The same batch with such a token in
each empty row has the reference's values among our metrics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.golden_maps.check import Case
from trainer.objectives.rollout_correction.correct import CorrectionResult

_NO_WEIGHT = -100.0
"""A trainer log-prob whose ratio to a rollout log-prob of 0 is as good as 0."""


def without_empty_rows(case: Case) -> dict[str, Any]:
    """The inputs of the rows with at least one token."""
    rows = case["inputs"]["response_mask"].sum(dim=-1) > 0
    return {name: tensor[rows] for name, tensor in case["inputs"].items()}


def reference_reading(
    case: Case, ours: CorrectionResult, correct: Callable[..., CorrectionResult]
) -> dict[str, CorrectionResult]:
    """For each of the reference's metrics, the result that reads empty rows as it does."""
    even = correct(**_fill_empty_rows(case, 0.0))
    weightless = correct(**_fill_empty_rows(case, _NO_WEIGHT))
    readings = {"none": ours, "even": even, "weightless": weightless}
    return {name: readings[_reading(name, case)] for name in case["outputs"]["metrics"]}


def _reading(name: str, case: Case) -> str:
    """How the reference reads empty rows in one metric: `none`, `even` or `weightless`."""
    short = name.removeprefix("rollout_corr/")
    kwargs = case["kwargs"]
    if short in ("kl", "k3_kl", "chi2_token"):
        return "none"
    if not short.startswith("rollout_"):
        return "even"
    if short in ("rollout_ppl", "rollout_log_ppl", "rollout_is_veto_fraction"):
        return "even"
    if short == "rollout_rs_seq_masked_fraction":
        return "even"
    for kind, level in (("is", kwargs.get("rollout_is")), ("rs", kwargs.get("rollout_rs"))):
        if short.startswith(f"rollout_{kind}_seq_"):
            # verl's metrics per rule carry the rule's name and leave empty rows out.
            return "none" if "_k" in short else "weightless"
        if short in {f"rollout_{kind}_{end}" for end in _ENDS} and level != "token":
            return "even"
    return "none"


_ENDS = ("max", "min", "ratio_fraction_high", "ratio_fraction_low")
"""Metrics over rows where a row has one ratio, else over tokens."""


def _fill_empty_rows(case: Case, train_logprob: float) -> dict[str, Any]:
    inputs = case["inputs"]
    mask, train = inputs["response_mask"].clone(), inputs["old_log_prob"].clone()
    rollout = inputs["rollout_log_prob"].clone()
    empty = mask.sum(dim=-1) == 0
    mask[empty, 0], train[empty, 0], rollout[empty, 0] = 1.0, train_logprob, 0.0
    return {"old_log_prob": train, "rollout_log_prob": rollout, "response_mask": mask}
