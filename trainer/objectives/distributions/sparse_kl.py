"""KL between student and teacher over a finite cache of tokens per position.

Formulas: ALGORITHMS 5.4. The support is the top-k of the student that sampled, or of the teacher.
Without a tail, a reverse KL over a stale support is biased once the student's mass has left it
(`student_mass` shows it); the forward KL is weighted by the teacher and hardly affected. With a
tail, the rest of the vocabulary is one more element (ALGORITHMS 2.6). Over the whole vocabulary
each is the dense KL.

Shapes: [..., K], K support entries per token. It knows no reduction over tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trainer.objectives.batch import TokenBatch, TokenTerms, selected
from trainer.objectives.distributions.kl import (
    ABSENT,
    divergence_terms,
    needed_support,
    with_tail,
)
from trainer.objectives.distributions.overlap_topk import OverlapTerms, overlap_topk, subset_reports
from trainer.objectives.options import SparseKl

Direction = Literal["reverse", "forward", "skewed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseKlTerms:
    """Per token [...]; every field but `loss` is detached.

    `clipped` is the share of elements that `token_clip` cut, the tail among them. The masses are
    the probability that either side puts on the support.
    """

    loss: Tensor
    clipped: Tensor
    student_mass: Tensor
    teacher_mass: Tensor


def sparse_kl(
    logprobs: Tensor,
    teacher_logprobs: Tensor,
    valid: Tensor | None = None,
    *,
    direction: Direction,
    alpha: float = 0.5,
    token_clip: float | None = None,
    tail: bool = False,
) -> SparseKlTerms:
    """Sum over the support of p (l - lt), of q (lt - l), or of alpha x forward + the rest reverse.

    Student p = exp(l) with gradient everywhere, teacher q = exp(lt) detached. `tail` adds what
    either side puts outside the support as one element. `token_clip` bounds each element from above
    and stops its gradient there. Places at `valid` 0 are ignored. Log-probs at `valid` 1 must be
    finite. Raises ValueError for an unknown direction, an alpha outside [0, 1] or a token_clip that
    is not positive.
    """
    if direction not in ("reverse", "forward", "skewed"):
        raise ValueError(f"unknown direction {direction!r}; use reverse, forward or skewed")
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha is the share of the forward KL, between 0 and 1, got {alpha}")
    if token_clip is not None and token_clip <= 0.0:
        raise ValueError(f"token_clip must be positive, got {token_clip}; None is off")
    forward_share = {"reverse": 0.0, "forward": 1.0, "skewed": alpha}[direction]
    everything = torch.ones_like(logprobs, dtype=torch.bool)
    in_support = everything if valid is None else (valid > 0).expand_as(logprobs)
    student = selected(logprobs, in_support)
    teacher = selected(teacher_logprobs, in_support).detach()
    student_mass = selected(student.detach().exp(), in_support).sum(dim=-1)
    teacher_mass = selected(teacher.exp(), in_support).sum(dim=-1)
    if tail:
        student, teacher = (
            with_tail(side.masked_fill(~in_support, ABSENT)) for side in (student, teacher)
        )
    elements = _elements(student, teacher, forward_share)
    clipped = torch.zeros_like(elements)
    if token_clip is not None:
        clipped = (elements > token_clip).to(elements.dtype)
        elements = elements.clamp(max=token_clip)
    size = in_support.to(logprobs.dtype).sum(dim=-1) + float(tail)
    return SparseKlTerms(
        loss=elements.sum(dim=-1),
        clipped=clipped.sum(dim=-1) / size.clamp(min=1.0),
        student_mass=student_mass,
        teacher_mass=teacher_mass,
    )


def sparse_policy_gradient(
    logprobs: Tensor,
    old_logprobs: Tensor,
    teacher_logprobs: Tensor,
    valid: Tensor | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> OverlapTerms:
    """Sum over the support of a dual-clipped surrogate, A = -(lo - lt) softmax_S(lo), detached.

    It is the surrogate of ALGORITHMS 3.4 with a dual clip and no clip of the difference.
    """
    return overlap_topk(
        logprobs,
        old_logprobs,
        teacher_logprobs,
        valid,
        difference_clip=None,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )


def _elements(student: Tensor, teacher: Tensor, forward_share: float) -> Tensor:
    gap = teacher - student
    if forward_share == 1.0:
        return teacher.exp() * gap
    if forward_share == 0.0:
        return -student.exp() * gap
    return (forward_share * teacher.exp() - (1.0 - forward_share) * student.exp()) * gap


def sparse_kl_terms(batch: TokenBatch, options: SparseKl) -> TokenTerms:
    """KL on a finite cache of tokens (ALGORITHMS 5.4)."""
    support = needed_support(batch, options.name)
    if options.direction == "policy_gradient":
        clipped = sparse_policy_gradient(
            support.student_BTK, support.old_BTK, support.teacher_BTK, support.valid_BTK
        )
        return divergence_terms(batch, clipped.loss, subset_reports(clipped))
    result = sparse_kl(
        support.student_BTK,
        support.teacher_BTK,
        support.valid_BTK,
        direction=options.direction,
        alpha=options.alpha,
        token_clip=options.token_clip,
        tail=options.tail,
    )
    means = {
        "opd/student_mass": result.student_mass,
        "opd/teacher_mass": result.teacher_mass,
        "opd/token_clipfrac": result.clipped,
    }
    return divergence_terms(batch, result.loss, means)
