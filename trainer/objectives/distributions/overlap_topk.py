"""OpenClaw v2's distillation: a clipped step on every token of a small support.

Formula: ALGORITHMS 3.4. The support S is the student's top-k at the start of the batch, the
teacher's, or what both share. Log-probs are of the full vocabulary, gathered elsewhere; the old
ones come from the trainer, not from the engine. It knows no reduction over tokens.

Shapes: [..., K], K support entries per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trainer.objectives.batch import TokenBatch, TokenTerms, selected
from trainer.objectives.distributions.gather import shared_ids
from trainer.objectives.distributions.kl import divergence_terms, needed_support
from trainer.objectives.options import OverlapTopk
from trainer.objectives.policy.ppo import ppo_clip

Subset = Literal["student", "teacher", "overlap"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SupportIds:
    """Token ids of the support [..., K], and 1.0 where a place holds one of its tokens."""

    ids: Tensor
    valid: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapTerms:
    """Per token [...]; every field but `loss` is detached.

    `clipped` is the share of the support where the clipped branch is the larger one, `difference`
    the weighted |teacher - old| after its clip, `size` the tokens in the support. All are 0 where
    the support is empty.
    """

    loss: Tensor
    clipped: Tensor
    difference: Tensor
    size: Tensor


@torch.no_grad()
def choose_support(student_ids: Tensor, teacher_ids: Tensor, subset: Subset) -> SupportIds:
    """The support of a `subset`; `overlap` has the student's ids, valid only where the teacher has
    them too.

    Negative ids are empty places and get id 0, so that they can be gathered. Raises ValueError
    for an unknown subset, or top-k sets of different positions that are compared.
    """
    if subset == "student":
        ids, kept = student_ids, student_ids >= 0
    elif subset == "teacher":
        ids, kept = teacher_ids, teacher_ids >= 0
    elif subset == "overlap":
        ids, kept = student_ids, shared_ids(student_ids, teacher_ids)
    else:
        raise ValueError(f"unknown support subset {subset!r}; use student, teacher or overlap")
    return SupportIds(ids=ids.clamp(min=0), valid=kept.to(torch.float32))


def overlap_topk(
    logprobs: Tensor,
    old_logprobs: Tensor,
    teacher_logprobs: Tensor,
    valid: Tensor | None = None,
    *,
    difference_clip: float | None,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> OverlapTerms:
    """Sum over S of the PPO-clip surrogate with A_v = w_v clip(lt_v - lo_v, +-difference_clip).

    w is the softmax of the old log-probs over S; A is detached, so the gradient flows through
    `logprobs` alone. Places at `valid` 0 and places with a log-prob that is not finite are not part
    of S. Raises ValueError for a clip that is not positive.
    """
    if difference_clip is not None and difference_clip <= 0:
        raise ValueError(f"difference_clip must be positive, got {difference_clip}; None is off")
    in_support = _in_support(logprobs, old_logprobs, teacher_logprobs, valid)
    logprobs = selected(logprobs, in_support)
    old = selected(old_logprobs, in_support).detach()
    difference = selected(teacher_logprobs, in_support).detach() - old
    if difference_clip is not None:
        difference = difference.clamp(-difference_clip, difference_clip)
    weights = support_weights(old, in_support)
    terms = ppo_clip(
        logprobs,
        old,
        difference * weights,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )
    size = in_support.to(logprobs.dtype).sum(dim=-1)
    return OverlapTerms(
        loss=terms.loss.sum(dim=-1),
        clipped=terms.clipped.sum(dim=-1) / size.clamp(min=1.0),
        difference=(weights * difference.abs()).sum(dim=-1),
        size=size,
    )


@torch.no_grad()
def support_weights(old_logprobs: Tensor, in_support: Tensor) -> Tensor:
    """Softmax over the places [..., K] that are in the support, 0 elsewhere; an empty row is 0."""
    outside = torch.full_like(old_logprobs, -torch.inf)
    weights = torch.softmax(torch.where(in_support, old_logprobs, outside), dim=-1)
    return selected(weights, in_support)


@torch.no_grad()
def _in_support(
    logprobs: Tensor, old_logprobs: Tensor, teacher_logprobs: Tensor, valid: Tensor | None
) -> Tensor:
    finite = torch.isfinite(logprobs) & torch.isfinite(old_logprobs)
    finite = finite & torch.isfinite(teacher_logprobs)
    return finite if valid is None else finite & (valid > 0)


def overlap_terms(batch: TokenBatch, options: OverlapTopk) -> TokenTerms:
    """OpenClaw v2's clipped steps on a small support (ALGORITHMS 3.4)."""
    support = needed_support(batch, options.name)
    result = overlap_topk(
        support.student_BTK,
        support.old_BTK,
        support.teacher_BTK,
        support.valid_BTK,
        difference_clip=options.difference_clip,
        clip_low=options.clip_low,
        clip_high=options.clip_high,
    )
    return divergence_terms(batch, options.opd_coef * result.loss, subset_reports(result))


def subset_reports(result: OverlapTerms) -> dict[str, Tensor]:
    """Means of steps on a support: the clipped share, tokens of it, |teacher - student|."""
    return {
        "opd/clipfrac": result.clipped,
        "opd/subset_size": result.size,
        "opd/absdiff": result.difference,
    }
