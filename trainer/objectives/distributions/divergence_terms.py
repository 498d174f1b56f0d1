"""Objectives that are a divergence from the teacher per position: value and reports per token.

Each takes a `TokenBatch` whose values are finite and 0 at mask 0 (batch.select_finite), and gives 0
where `opd_valid_BT` is 0: a token without a teacher has nothing to diverge from. The formulas are
in the modules imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from trainer.objectives.batch import Support, TokenBatch, TokenTerms
from trainer.objectives.distributions.forward_kl import forward_kl_topk
from trainer.objectives.distributions.kl import distillation_advantage, k3_clamped, kl_estimate
from trainer.objectives.distributions.kl_names import canonical_kl_name
from trainer.objectives.distributions.overlap_topk import OverlapTerms, overlap_topk
from trainer.objectives.distributions.self_distillation import (
    clipped_weights,
    self_distillation_divergence,
)
from trainer.objectives.distributions.side_samples import side_sample_forward_kl, side_samples
from trainer.objectives.distributions.sparse_kl import sparse_kl, sparse_policy_gradient
from trainer.objectives.distributions.tail_kl import topk_tail_reverse_kl
from trainer.objectives.options import (
    ForwardKlTopk,
    OverlapTopk,
    SelfDistillation,
    SideSampleOptions,
    SparseKl,
    SupervisedOpd,
    TopkTailReverseKl,
)


def supervised_terms(batch: TokenBatch, options: SupervisedOpd) -> TokenTerms:
    """The estimator of KL(student || teacher) on the sampled token (ALGORITHMS 2.1, 2.4)."""
    value_BT = kl_estimate(options.estimator, batch.logprobs_BT, batch.teacher_logprobs_BT)
    means = {"opd/abs_loss": value_BT.abs()}
    if canonical_kl_name(options.estimator)[0] == "k3":
        means["opd/k3_clamped_frac"] = k3_clamped(
            batch.logprobs_BT.detach(), batch.teacher_logprobs_BT
        )
    ranges = {"opd/loss": value_BT}
    loss_BT = options.opd_coef * _clamp(value_BT, options.loss_max_clamp)
    return _terms(batch, loss_BT, means, ranges)


def forward_kl_terms(batch: TokenBatch, options: ForwardKlTopk) -> TokenTerms:
    """KL(teacher || student) on the teacher's top-k, not below 0 (ALGORITHMS 2.5)."""
    support = _support(batch)
    result = forward_kl_topk(
        support.student_BTK,
        support.teacher_BTK,
        support.student_topk_ids_BTK,
        None if support.student_topk_ids_BTK is None else support.ids_BTK,
        options.log_prob_min_clamp,
        valid=support.valid_BTK,
    )
    means = {"opd/student_mass": result.student_mass, "opd/teacher_mass": result.teacher_mass}
    if result.overlap_count is not None and result.overlap_token_advantage is not None:
        size = support.ids_BTK.shape[-1]
        means["opd/overlap_ratio"] = result.overlap_count.to(batch.mask_BT.dtype) / size
        # The batch divides the second by the third: a mean over tokens that share something.
        means["opd/overlap_token_advantage"] = result.overlap_token_advantage
        means["opd/overlapping_frac"] = (result.overlap_count > 0).to(batch.mask_BT.dtype)
    ranges = {
        "opd/loss": result.loss,
        "opd/student_mass": result.student_mass,
        "opd/teacher_mass": result.teacher_mass,
    }
    return _terms(batch, _clamp(result.loss, options.loss_max_clamp), means, ranges)


def tail_kl_terms(batch: TokenBatch, options: TopkTailReverseKl) -> TokenTerms:
    """KL(student || teacher) on the teacher's top-k and the rest (ALGORITHMS 2.6)."""
    support = _support(batch)
    result = topk_tail_reverse_kl(support.student_BTK, support.teacher_BTK, valid=support.valid_BTK)
    means = {
        "opd/student_tail": result.student_tail.exp(),
        "opd/teacher_tail": result.teacher_tail.exp(),
    }
    ranges = {"opd/loss": result.kl}
    return _terms(batch, _clamp(result.kl, options.loss_max_clamp), means, ranges)


def self_distillation_terms(batch: TokenBatch, options: SelfDistillation) -> TokenTerms:
    """SDPO's divergence, weighted by the sampled token's clipped ratio (ALGORITHMS 2.7)."""
    support = _support(batch)
    value_BT = self_distillation_divergence(
        support.student_BTK,
        support.teacher_BTK,
        alpha=options.alpha,
        rest="tail" if options.tail else "renormalise",
        valid=support.valid_BTK,
    )
    means: dict[str, Tensor] = {"opd/divergence": value_BT.detach()}
    if options.is_clip is not None:
        weights = clipped_weights(
            batch.logprobs_sampled_BT, batch.old_logprobs_sampled_BT, is_clip=options.is_clip
        )
        value_BT = value_BT * weights.weights
        means["opd/is_capped_frac"] = weights.capped
    return _terms(batch, value_BT * batch.weights_BT.detach(), means)


def overlap_terms(batch: TokenBatch, options: OverlapTopk) -> TokenTerms:
    """OpenClaw v2's clipped steps on a small support (ALGORITHMS 3.4)."""
    support = _support(batch)
    result = overlap_topk(
        support.student_BTK,
        support.old_BTK,
        support.teacher_BTK,
        support.valid_BTK,
        difference_clip=options.difference_clip,
        clip_low=options.clip_low,
        clip_high=options.clip_high,
    )
    return _terms(batch, options.opd_coef * result.loss, _subset_reports(result))


def side_sample_terms(batch: TokenBatch, options: SideSampleOptions) -> TokenTerms:
    """Multi-sample Monte Carlo of KL(student || teacher), or of KL(teacher || student) (ALGORITHMS
    5.2, 5.4).
    """
    support = _support(batch)
    if options.direction == "forward":
        value_BT = side_sample_forward_kl(
            support.student_BTK, support.teacher_BTK, support.valid_BTK
        )
        return _terms(batch, value_BT, {})
    result = side_samples(
        support.student_BTK,
        support.old_BTK,
        support.teacher_BTK,
        support.valid_BTK,
        advantage_reference=options.advantage_reference,
        clip_low=options.clip,
        clip_high=options.clip,
        importance=options.importance,
    )
    samples = result.samples
    means = {
        "opd/side_ratio": samples.ratio.mean(dim=-1),
        "opd/side_ratio_max": samples.ratio.amax(dim=-1),
        "opd/side_advantage": samples.advantages.mean(dim=-1),
        "opd/side_clipfrac": (samples.above + samples.below).mean(dim=-1),
    }
    return _terms(batch, result.loss_BT, means)


def sparse_kl_terms(batch: TokenBatch, options: SparseKl) -> TokenTerms:
    """KL on a finite cache of tokens (ALGORITHMS 5.4)."""
    support = _support(batch)
    if options.direction == "policy_gradient":
        clipped = sparse_policy_gradient(
            support.student_BTK, support.old_BTK, support.teacher_BTK, support.valid_BTK
        )
        return _terms(batch, clipped.loss, _subset_reports(clipped))
    result = sparse_kl(
        support.student_BTK,
        support.teacher_BTK,
        support.valid_BTK,
        direction=options.direction,
        alpha=options.alpha,
        token_clip=options.token_clip,
    )
    means = {
        "opd/student_mass": result.student_mass,
        "opd/teacher_mass": result.teacher_mass,
        "opd/token_clipfrac": result.clipped,
    }
    return _terms(batch, result.loss, means)


def _subset_reports(result: OverlapTerms) -> dict[str, Tensor]:
    return {
        "opd/clipfrac": result.clipped,
        "opd/subset_size": result.size,
        "opd/absdiff": result.difference,
    }


def _terms(
    batch: TokenBatch,
    loss_BT: Tensor,
    means: dict[str, Tensor],
    ranges: Mapping[str, Tensor] = MappingProxyType({}),
) -> TokenTerms:
    """Values at tokens with a teacher. The gap of the sampled token stands for the advantage."""
    valid_BT = batch.opd_valid_BT
    gap_BT = distillation_advantage(batch.teacher_logprobs_BT, batch.old_logprobs_BT) * valid_BT
    return TokenTerms(
        loss_BT=torch.where(valid_BT > 0, loss_BT, torch.zeros_like(loss_BT)) * valid_BT,
        advantages_BT=gap_BT,
        gap_BT=gap_BT,
        means={name: value.detach() * valid_BT for name, value in means.items()},
        ranges={name: value.detach() for name, value in ranges.items()},
    )


def _support(batch: TokenBatch) -> Support:
    assert batch.support is not None
    return batch.support


def _clamp(values_BT: Tensor, limit: float | None) -> Tensor:
    return values_BT if limit is None else values_BT.clamp(-limit, limit)
