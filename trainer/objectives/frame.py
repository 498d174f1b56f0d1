"""The loss of one micro-batch under any objective, everything it reports, and the objectives by
name.

    L = R(objective) + beta_kl R(KL to the frozen start) - beta_entropy R(entropy)

Guards, reduction, the KL to the start and the reports are the same for every objective; an
objective gives a value per token (`_TERMS`), and what each needs from a run is in options.py. A
metric that an objective promises (`_MEANS`) but does not report stops training. The frame knows
tensors only: no model, no store. Reduced values of micro-batches add up to those of the batch,
given the counts of the GLOBAL batch.

Formulas: ALGORITHMS 2.3, 2.8, 6.10. Shapes: B rows, T tokens; element [b, t] is about token t.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from trainer.objectives.batch import (
    AggregationMode,
    GlobalCounts,
    TokenBatch,
    TokenTerms,
    reduction_weights,
    select_finite,
    weighted_sum,
)
from trainer.objectives.distributions.kl import (
    comparable_ratio,
    forward_kl_terms,
    k3_clamped,
    kl_to_start,
    supervised_terms,
    tail_kl_terms,
)
from trainer.objectives.distributions.overlap_topk import overlap_terms
from trainer.objectives.distributions.self_distillation import self_distillation_terms
from trainer.objectives.distributions.side_samples import side_sample_terms
from trainer.objectives.distributions.sparse_kl import sparse_kl_terms
from trainer.objectives.names import (
    KlEstimator,
    KlRatio,
    canonical_kl_name,
    validate_kl_loss_name,
)
from trainer.objectives.options import (
    HindsightOpd,
    ObjectiveOptions,
    OverlapTopk,
    SideSampleOptions,
    SparseKl,
)
from trainer.objectives.policy.policy_gradient import POLICY_GRADIENT_MEANS, policy_gradient_terms
from trainer.objectives.policy.ppo import ppo_clip

ABS_LOSS = "opd/abs_loss"
_TERMS: Mapping[str, Callable[[TokenBatch, Any], TokenTerms]] = {
    "hindsight_opd": policy_gradient_terms,
    "supervised_opd": supervised_terms,
    "forward_kl_topk": forward_kl_terms,
    "topk_tail_reverse_kl": tail_kl_terms,
    "self_distillation": self_distillation_terms,
    "overlap_topk": overlap_terms,
    "side_samples": side_sample_terms,
    "sparse_kl": sparse_kl_terms,
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


WEIGHT_TOLERANCE = 1e-5
"""A weight that differs from its ratio by more was capped, zeroed, normalised, not applied, or is
one of another proximal policy.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """What surrounds the objective; names and defaults as in `TrainerConfig`.

    `horizon` divides under seq-mean-token-sum-norm. `reward_clip_low` and `reward_clip_high` are
    for the PPO term on rewards that is added to objectives which are not PPO themselves.
    """

    aggregation: AggregationMode = "turn-mean-token-mean"
    beta_kl: float = 0.02
    kl_type: str = "low_var_kl"
    kl_ratio: KlRatio = "none"
    beta_entropy: float = 0.0
    horizon: int | None = None
    reward_clip_low: float = 0.2
    reward_clip_high: float = 0.28

    estimator: KlEstimator = field(init=False)
    """That of `kl_type`."""

    def __post_init__(self) -> None:
        validate_kl_loss_name(self.kl_type)
        object.__setattr__(self, "estimator", canonical_kl_name(self.kl_type))


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveResult:
    """`loss` carries the gradient. The rest is detached, except `distillation_loss`.

    `reduced` are values under R, additive over micro-batches; `token_sums` are sums over tokens and
    `token_max` maxima, from which the batch's statistics are made; `token_ranges` are (smallest,
    largest) over tokens with a teacher, if there are any. `distillation_loss` is the objective's
    own term, `gap_BT` teacher - student of each sampled token. `weights_BT` are the weights of
    rollout correction as they were applied, `mask_BT` the mask after non-finite tokens were taken
    out.
    """

    loss: Tensor
    distillation_loss: Tensor
    reduced: dict[str, Tensor]
    token_sums: dict[str, Tensor]
    token_max: dict[str, Tensor]
    token_ranges: dict[str, tuple[Tensor, Tensor]]
    advantages_BT: Tensor
    gap_BT: Tensor
    weights_BT: Tensor
    mask_BT: Tensor
    counts: GlobalCounts


def objective_loss(
    batch: TokenBatch,
    options: ObjectiveOptions,
    settings: LossSettings,
    counts: GlobalCounts | None = None,
) -> ObjectiveResult:
    """Loss and reports of one micro-batch; `counts` default to those of this micro-batch.

    Tokens whose trainer-side log-probs are not finite are dropped and counted in
    `token_sums["nonfinite"]`; an empty mask gives a differentiable zero. Raises ValueError if the
    reference or a support is needed but absent.
    """
    if settings.beta_kl > 0 and batch.reference_logprobs_BT is None:
        raise ValueError("beta_kl > 0 needs reference log-probs")
    clip_low, clip_high = _start_clip(options, settings)
    clean, num_nonfinite = select_finite(batch)
    own = GlobalCounts.of(clean.mask_BT, clean.turn_ids_BT)
    weights_BT = reduction_weights(clean, settings.aggregation, counts or own, settings.horizon)
    # Per token first, then all of it reduced.
    terms = objective_terms(clean, options)
    values = {**terms.means, "entropy_loss": clean.entropy_BT}
    if options.reward_coef > 0 and not options.is_policy_gradient:
        values["reward_pg_loss"] = _reward_terms(clean, settings)
    if clean.reference_logprobs_BT is not None:
        values["kl_loss"] = kl_to_start(
            clean, settings.estimator, settings.kl_ratio, clip_low=clip_low, clip_high=clip_high
        )
        values["kl/clamped_frac"] = k3_clamped(
            clean.logprobs_BT.detach(), clean.reference_logprobs_BT
        )
    compared_BT = clean.compared_logprobs_BT
    if compared_BT is None:
        compared_BT = clean.old_logprobs_sampled_BT
    ratio_BT = comparable_ratio(compared_BT, clean.rollout_logprobs_BT)
    applied_BT = clean.weights_BT if terms.weights_BT is None else terms.weights_BT
    values |= _rollout_reports(clean, compared_BT, ratio_BT, applied_BT)
    sums, maxima = _token_reports(clean, terms, options)
    ranges = _ranges(clean, terms)
    reduced = {name: weighted_sum(one_BT, weights_BT) for name, one_BT in values.items()}
    taught_BT = weights_BT if clean.emphasis_BT is None else weights_BT * clean.emphasis_BT
    distillation = weighted_sum(terms.loss_BT, taught_BT)
    loss = distillation
    if "reward_pg_loss" in reduced:
        loss = loss + options.reward_coef * reduced["reward_pg_loss"]
    if settings.beta_kl > 0:
        loss = loss + settings.beta_kl * reduced["kl_loss"]
    if settings.beta_entropy != 0:
        loss = loss - settings.beta_entropy * reduced["entropy_loss"]
    reduced |= {"opd/kl_loss": distillation, "loss": loss}
    return ObjectiveResult(
        loss=loss,
        distillation_loss=distillation,
        reduced={name: value.detach() for name, value in reduced.items()},
        token_sums=sums | {"nonfinite": num_nonfinite},
        token_max=maxima,
        token_ranges=ranges,
        advantages_BT=terms.advantages_BT,
        gap_BT=terms.gap_BT.detach(),
        weights_BT=applied_BT.detach(),
        mask_BT=clean.mask_BT,
        counts=own,
    )


def _reward_terms(clean: TokenBatch, settings: LossSettings) -> Tensor:
    """PPO on the sampled tokens with the rewards' advantages (ALGORITHMS 3.4, w_RL)."""
    return ppo_clip(
        clean.logprobs_sampled_BT,
        clean.old_logprobs_sampled_BT,
        clean.reward_advantages_BT,
        clip_low=settings.reward_clip_low,
        clip_high=settings.reward_clip_high,
        weights=clean.weights_BT,
    ).loss


def _start_clip(options: ObjectiveOptions, settings: LossSettings) -> tuple[float, float]:
    """The clip of the ratio in the KL to the start: the objective's, if that has one."""
    if isinstance(options, HindsightOpd | OverlapTopk):
        return options.clip_low, options.clip_high
    return settings.reward_clip_low, settings.reward_clip_high


@torch.no_grad()
def _rollout_reports(
    clean: TokenBatch, trainer_BT: Tensor, ratio_BT: Tensor, applied_BT: Tensor
) -> dict[str, Tensor]:
    """Trainer against rollout engine per token: the gap, and the weights that correct the ratio
    (6.1) as they were applied.
    """
    comparable_BT = torch.isfinite(clean.rollout_logprobs_BT)
    gap_BT = (trainer_BT - clean.rollout_logprobs_BT).abs()
    gap_BT = torch.where(comparable_BT, gap_BT, torch.zeros_like(gap_BT))
    acted_BT = (applied_BT - ratio_BT).abs() > WEIGHT_TOLERANCE
    return {
        "tis": applied_BT,
        "tis_abs": (ratio_BT - 1.0).abs(),
        "tis_clipfrac": acted_BT.to(gap_BT.dtype),
        # Of comparable tokens only: divide by `rollout_comparable_frac` for the mean over them.
        "train_rollout_logprob_abs_diff": gap_BT,
        "rollout_comparable_frac": comparable_BT.to(gap_BT.dtype),
    }


@torch.no_grad()
def _token_reports(
    clean: TokenBatch, terms: TokenTerms, options: ObjectiveOptions
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Sums in float64 over policy tokens, and maxima (0 for an empty mask)."""
    used_BT = clean.mask_BT > 0
    advantages = terms.advantages_BT[used_BT].double()
    rewards = clean.reward_advantages_BT[used_BT].double()
    log_ratios = (clean.logprobs_sampled_BT - clean.old_logprobs_sampled_BT)[used_BT].double()
    sums = {
        "tokens": clean.mask_BT.double().sum(),
        "tokens_with_teacher": (clean.opd_valid_BT * clean.mask_BT).double().sum(),
        "adv": advantages.sum(),
        "adv_squared": advantages.square().sum(),
        "adv_positive": (advantages > 0).double().sum(),
        "gap_abs": terms.gap_BT[used_BT].double().abs().sum(),
        "reward_abs": options.reward_coef * rewards.abs().sum(),
    }
    zero = advantages.new_zeros(())
    maxima = {
        "adv_abs_max": advantages.abs().max() if advantages.numel() else zero,
        "ratio_max": log_ratios.clamp(-20.0, 20.0).exp().max() if advantages.numel() else zero,
    }
    return sums, maxima


@torch.no_grad()
def _ranges(clean: TokenBatch, terms: TokenTerms) -> dict[str, tuple[Tensor, Tensor]]:
    """Smallest and largest value over the policy tokens that have a teacher."""
    taught_BT = (clean.mask_BT > 0) & (clean.opd_valid_BT > 0)
    if not bool(taught_BT.any()):
        return {}
    return {name: values[taught_BT].aminmax() for name, values in terms.ranges.items()}
