"""The objectives by name: the term of each, and what it must report.

A metric that an objective promises but does not report stops training. What each needs from a run
is in options.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from trainer.objectives.batch import TokenBatch, TokenTerms
from trainer.objectives.distributions import divergence_terms as divergences
from trainer.objectives.options import HindsightOpd, ObjectiveOptions, SideSampleOptions, SparseKl
from trainer.objectives.policy.policy_gradient import POLICY_GRADIENT_MEANS, policy_gradient_terms

ABS_LOSS = "opd/abs_loss"
_TERMS: Mapping[str, Callable[[TokenBatch, Any], TokenTerms]] = {
    "hindsight_opd": policy_gradient_terms,
    "supervised_opd": divergences.supervised_terms,
    "forward_kl_topk": divergences.forward_kl_terms,
    "topk_tail_reverse_kl": divergences.tail_kl_terms,
    "self_distillation": divergences.self_distillation_terms,
    "overlap_topk": divergences.overlap_terms,
    "side_samples": divergences.side_sample_terms,
    "sparse_kl": divergences.sparse_kl_terms,
}
_MEANS: Mapping[str, frozenset[str]] = {
    "supervised_opd": frozenset(),
    "forward_kl_topk": frozenset({"opd/student_mass", "opd/teacher_mass", "opd/overlap_ratio"}),
    "topk_tail_reverse_kl": frozenset({"opd/student_tail", "opd/teacher_tail"}),
    "self_distillation": frozenset({"opd/divergence"}),
    "overlap_topk": frozenset({"opd/clipfrac", "opd/subset_size", "opd/absdiff"}),
    "side_samples": frozenset({"opd/side_ratio", "opd/side_ratio_max", "opd/side_advantage"}),
    "sparse_kl": frozenset({"opd/student_mass", "opd/teacher_mass", "opd/token_clipfrac"}),
}


def objective_terms(batch: TokenBatch, options: ObjectiveOptions) -> TokenTerms:
    """Value, advantages and reports per token; `batch` comes from `select_finite`. Every objective
    reports its mean size and its extremes, before a clamp where it has one.
    """
    terms = _TERMS[options.name](batch, options)
    loss_BT = terms.loss_BT.detach()
    return replace(
        terms,
        means={ABS_LOSS: loss_BT.abs(), **terms.means},
        ranges={"opd/loss": loss_BT, **terms.ranges},
    )


def expected_means(options: ObjectiveOptions) -> frozenset[str]:
    """Metrics under the reduction that this objective always reports."""
    if isinstance(options, HindsightOpd):
        return POLICY_GRADIENT_MEANS | {ABS_LOSS}
    if isinstance(options, SideSampleOptions) and options.direction == "forward":
        return frozenset({ABS_LOSS})
    is_sparse_gradient = isinstance(options, SparseKl) and options.direction == "policy_gradient"
    return _MEANS["overlap_topk" if is_sparse_gradient else options.name] | {ABS_LOSS}
