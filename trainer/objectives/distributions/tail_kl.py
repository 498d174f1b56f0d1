"""Reverse KL on a top-k support with one bucket for all the rest, and its parts.

    tail(x): z = min(logsumexp(x), -1e-7); append log(-expm1(z))
    D = sum over K + 1 of e^a (a - b), a = tail(student), b = tail(teacher)      (ALGORITHMS 2.6)

The gradient flows through all of a, the tail too; teachers are detached. It knows no reduction.

Shapes: any leading [...], K support.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.objectives.batch import TokenBatch, TokenTerms
from trainer.objectives.distributions.kl import (
    at_least_float32,
    clamped,
    divergence_terms,
    needed_support,
)
from trainer.objectives.options import TopkTailReverseKl

TAIL_CEILING = -1e-7
"""Largest log-mass of a support: above it the rest would be log(0) or worse by rounding."""
_ABSENT = -1e30
"""Log-prob of what has no probability on either side: exp gives 0, differences stay finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TailKlTerms:
    """Per token [...]; `student_tail` and `teacher_tail` are the detached log-masses outside the
    support.
    """

    kl: Tensor
    student_tail: Tensor
    teacher_tail: Tensor


def topk_tail_reverse_kl(
    student_logprobs: Tensor,
    teacher_logprobs: Tensor,
    *,
    valid: Tensor | None = None,
) -> TailKlTerms:
    """KL(student || teacher) over K tokens and the rest; global log-probs [..., K].

    `valid`: see `comparable`. Raises ValueError for shapes that differ.
    """
    student, teacher = comparable(student_logprobs, teacher_logprobs, valid)
    student, teacher = with_tail(student), with_tail(teacher)
    return TailKlTerms(
        kl=kl_terms(student, teacher).sum(dim=-1),
        student_tail=student[..., -1].detach(),
        teacher_tail=teacher[..., -1],
    )


def tail_logprob(logprobs: Tensor) -> Tensor:
    """Log of the probability [...] outside a support of log-probs [..., K], with gradient."""
    mass = torch.logsumexp(logprobs, dim=-1).clamp(max=TAIL_CEILING)
    return torch.log(-torch.expm1(mass))


def with_tail(logprobs: Tensor) -> Tensor:
    """[..., K] -> [..., K + 1]: the support and the bucket of the rest, which sum to one."""
    return torch.cat([logprobs, tail_logprob(logprobs).unsqueeze(-1)], dim=-1)


def comparable(
    student_logprobs: Tensor, teacher_logprobs: Tensor, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Both in at least float32, the teacher detached, without weight where neither has any.

    Those are tokens impossible on both sides (a padded vocabulary), and places where `valid` is 0:
    [..., K] for the empty ones of a support, [..., 1] for tokens at mask 0. Whatever the latter
    contain, even NaN, reaches neither value nor gradient. Raises ValueError for shapes that differ.
    """
    shape = student_logprobs.shape
    if teacher_logprobs.shape != shape or (
        valid is not None and valid.shape not in (shape, (*shape[:-1], 1))
    ):
        raise ValueError(
            f"student, teacher and valid must have one shape [..., K], got {tuple(shape)}, "
            f"{tuple(teacher_logprobs.shape)}, {None if valid is None else tuple(valid.shape)}"
        )
    student = at_least_float32(student_logprobs)
    teacher = at_least_float32(teacher_logprobs.detach())
    absent = (student == -torch.inf) & (teacher == -torch.inf)
    if valid is not None:
        absent = absent | (valid <= 0)
    return student.masked_fill(absent, _ABSENT), teacher.masked_fill(absent, _ABSENT)


def kl_terms(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """e^p (p - q) per element, 0 with gradient 0 where p is -inf; their sum is KL(p || q)."""
    impossible = logprobs == -torch.inf
    logprobs = logprobs.masked_fill(impossible, _ABSENT)
    other_logprobs = other_logprobs.masked_fill(impossible, _ABSENT)
    return torch.exp(logprobs) * (logprobs - other_logprobs)


def tail_kl_terms(batch: TokenBatch, options: TopkTailReverseKl) -> TokenTerms:
    """KL(student || teacher) on the teacher's top-k and the rest (ALGORITHMS 2.6)."""
    support = needed_support(batch)
    result = topk_tail_reverse_kl(support.student_BTK, support.teacher_BTK, valid=support.valid_BTK)
    means = {
        "opd/student_tail": result.student_tail.exp(),
        "opd/teacher_tail": result.teacher_tail.exp(),
    }
    ranges = {"opd/loss": result.kl}
    return divergence_terms(batch, clamped(result.kl, options.loss_max_clamp), means, ranges)
