"""SDPO's family of divergences between the student and its own hint-conditioned self.

    alpha 0: KL(q || p)    alpha 1: KL(p || q)    between, with m = (1 - alpha) p + alpha q:
    D = (1 - alpha) KL(p || m) + alpha KL(q || m)                                (ALGORITHMS 2.7)

p student, q teacher (detached), over the whole vocabulary, or over a support that either gets a
bucket for the rest or is renormalised. Whose top-k the support is makes no difference here.
`sampled_token` needs no support. Shapes: B rows, T tokens, K support or vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trainer.objectives.aggregate import AggregationMode, token_weights, weighted_sum
from trainer.objectives.distributions.gather import at_least_float32
from trainer.objectives.distributions.kl import LOG_RATIO_LIMIT
from trainer.objectives.distributions.tail_kl import comparable, kl_terms, with_tail

Rest = Literal["none", "tail", "renormalise"]
"""What becomes of the tokens outside the support; `none` is for the whole vocabulary."""


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
    """D [...] of global log-probs [..., K]; not below 0 but for rounding.

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


def sampled_token_divergence(
    logprobs: Tensor, teacher_logprobs: Tensor, *, mask: Tensor | None = None
) -> Tensor:
    """sg(l - lt) l per sampled token [...]: its gradient is an estimate of KL(p || q)'s.

    Its value is no divergence. This is `alpha` 1 without logits; other alphas have no such form.
    Tokens at `mask` 0 give 0 with gradient 0, whatever they hold.
    """
    logprobs = at_least_float32(logprobs)
    teacher_logprobs = at_least_float32(teacher_logprobs)
    if mask is not None:
        logprobs = _zero_unselected(logprobs, mask)
        teacher_logprobs = _zero_unselected(teacher_logprobs, mask)
    return (logprobs - teacher_logprobs).detach() * logprobs


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


def self_distillation_mask(mask_BT: Tensor, target_B: Tensor | None) -> Tensor:
    """The mask without rows that have no target: 1 iff a solution or feedback was shown [B]."""
    return mask_BT if target_B is None else mask_BT * target_B.to(mask_BT.dtype).unsqueeze(-1)


def self_distillation_loss(
    divergence_BT: Tensor,
    mask_BT: Tensor,
    *,
    mode: AggregationMode,
    target_B: Tensor | None = None,
    weights: ClippedWeights | None = None,
    rollout_weights_BT: Tensor | None = None,
    turn_ids_BT: Tensor | None = None,
    num_sequences: int | None = None,
) -> Tensor:
    """The reduced loss: divergence x clipped weight x weight of rollout correction.

    `num_sequences` is as in `token_weights`. A batch without targets gives a differentiable zero.
    """
    selected_BT = self_distillation_mask(mask_BT, target_B)
    loss_BT = _zero_unselected(divergence_BT, selected_BT)
    if weights is not None:
        loss_BT = loss_BT * _zero_unselected(weights.weights, selected_BT)
    if rollout_weights_BT is not None:
        loss_BT = loss_BT * _zero_unselected(rollout_weights_BT.detach(), selected_BT)
    weights_BT = token_weights(
        selected_BT, mode, turn_ids_BT=turn_ids_BT, num_sequences=num_sequences
    )
    return weighted_sum(loss_BT, weights_BT)


def _complete(logprobs: Tensor, rest: Rest) -> Tensor:
    """A distribution that sums to one, out of a part of one."""
    if rest == "none":
        return logprobs
    if rest == "tail":
        return with_tail(logprobs)
    if rest == "renormalise":
        return logprobs - torch.logsumexp(logprobs, dim=-1, keepdim=True)
    raise ValueError(f"unknown rest {rest!r}; one of none, tail, renormalise")


def _zero_unselected(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return torch.where(mask_BT > 0, values_BT, torch.zeros_like(values_BT))
