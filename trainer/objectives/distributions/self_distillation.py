"""SDPO's family of divergences between the student and its own hint-conditioned self.

    alpha 0: KL(q || p)    alpha 1: KL(p || q)    between, with m = (1 - alpha) p + alpha q:
    D = (1 - alpha) KL(p || m) + alpha KL(q || m)                                (ALGORITHMS 2.7)

p student, q teacher (detached), over a support that either gets a bucket for the rest or is
renormalised; one of the whole vocabulary stays as it is. Whose top-k the support is makes no
difference here. Shapes: any leading [...], K support.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trainer.objectives.batch import TokenBatch, TokenTerms
from trainer.objectives.distributions.kl import (
    LOG_RATIO_LIMIT,
    at_least_float32,
    comparable,
    divergence_terms,
    kl_terms,
    needed_support,
    with_tail,
)
from trainer.objectives.options import SelfDistillation

Rest = Literal["tail", "renormalise"]
"""What becomes of the tokens outside the support."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedWeights:
    """Detached, per token [...]: the weight after the cap, and 1.0 where it was capped."""

    weights: Tensor
    capped: Tensor


def self_distillation_divergence(
    student_logprobs: Tensor,
    teacher_logprobs: Tensor,
    *,
    alpha: float,
    rest: Rest,
    valid: Tensor | None = None,
) -> Tensor:
    """D [...] of global log-probs [..., K]; not below 0 except for rounding.

    `valid`: see `comparable`. Raises ValueError for an `alpha` outside
    [0, 1], an unknown `rest` and shapes that differ.
    """
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha must be within [0, 1], got {alpha}")
    student, teacher = comparable(student_logprobs, teacher_logprobs, valid)
    student, teacher = _complete(student, rest), _complete(teacher, rest)
    if alpha == 0.0:
        return kl_terms(teacher, student).sum(dim=-1)
    if alpha == 1.0:
        return kl_terms(student, teacher).sum(dim=-1)
    mixture = torch.logaddexp(student + math.log1p(-alpha), teacher + math.log(alpha))
    from_student = kl_terms(student, mixture).sum(dim=-1)
    from_teacher = kl_terms(teacher, mixture).sum(dim=-1)
    return (1.0 - alpha) * from_student + alpha * from_teacher


@torch.no_grad()
def clipped_weights(logprobs: Tensor, old_logprobs: Tensor, *, is_clip: float) -> ClippedWeights:
    """min(exp(clip(l - lo, +-20)), is_clip) per sampled token. Raises ValueError for a cap <= 0."""
    if is_clip <= 0:
        raise ValueError(f"is_clip must be positive, got {is_clip}; use None for no weight")
    gap = at_least_float32(logprobs) - at_least_float32(old_logprobs)
    ratio = torch.exp(gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    return ClippedWeights(
        weights=ratio.clamp(max=is_clip), capped=(ratio > is_clip).to(ratio.dtype)
    )


def _complete(logprobs: Tensor, rest: Rest) -> Tensor:
    """A distribution that sums to one, from a part of one."""
    if rest == "tail":
        return with_tail(logprobs)
    if rest == "renormalise":
        return logprobs - torch.logsumexp(logprobs, dim=-1, keepdim=True)
    raise ValueError(f"unknown rest {rest!r}; one of tail, renormalise")


def self_distillation_terms(batch: TokenBatch, options: SelfDistillation) -> TokenTerms:
    """SDPO's divergence, weighted by the sampled token's clipped ratio (ALGORITHMS 2.7)."""
    support = needed_support(batch, options.name)
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
    return divergence_terms(batch, value_BT * batch.weights_BT.detach(), means)
