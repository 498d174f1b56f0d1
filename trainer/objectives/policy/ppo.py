"""Surrogates per token from a ratio of log-probs: PPO's clip, with optional dual clip and a
detached weight; and REINFORCE with a detached weight and no clip.

Formulas: ALGORITHMS 2.2 and 4.5 (iii). Any shape; it knows no masks and no reduction.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.objectives.distributions.kl import log_ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class PpoTerms:
    """Per-token results, all shaped like the inputs; every field but `loss` is detached."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    clipped_lower: Tensor
    kl: Tensor


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    weights: Tensor | None = None,
) -> PpoTerms:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = exp(clip(l - lo, +-20)).

    `dual_clip` c > 1 bounds the loss by -cA where A < 0. `weights` multiply the result after
    clipping and are detached. `kl` is the clamped lo - l; `clipped` is 1.0 where the clipped branch
    is the larger one. Raises ValueError for a dual clip of 1 or less.
    """
    return clipped_surrogate(
        log_ratio(logprobs, old_logprobs),
        advantages,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        weights=weights,
    )


def clipped_surrogate(
    log_ratios: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    weights: Tensor | None = None,
) -> PpoTerms:
    """`ppo_clip` for ratios given by their logarithm, clamped already; `kl` is minus that."""
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(f"dual_clip must be above 1, got {dual_clip}")
    ratio = torch.exp(log_ratios)
    unclipped = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(unclipped, clipped)
    clipped_lower = torch.zeros_like(loss)
    if dual_clip is not None:
        bound = -advantages * dual_clip
        negative = advantages < 0
        clipped_lower = ((loss > bound) & negative).to(loss.dtype)
        loss = torch.where(negative, torch.minimum(loss, bound), loss)
    if weights is not None:
        loss = loss * weights.detach()
    return PpoTerms(
        loss=loss,
        ratio=ratio.detach(),
        clipped=(clipped > unclipped).to(loss.dtype).detach(),
        clipped_lower=clipped_lower.detach(),
        kl=-log_ratios.detach(),
    )


def pure_is(logprobs: Tensor, advantages: Tensor, weights: Tensor | None = None) -> Tensor:
    """-A l sg(w) per token; w is 1 without weights. Weights are of the CURRENT policy over the one
    that sampled, made anew in each micro-batch.

    A weight that kept its gradient would add w' l to it, which can turn its sign (9 item 12).
    """
    loss = -advantages * logprobs
    return loss if weights is None else loss * weights.detach()
