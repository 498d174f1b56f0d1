"""CISPO: the ratio is clipped and detached, and the gradient of every token survives the clip.

Formula: ALGORITHMS 6.5. Any shape; it knows no masks and no reduction.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.objectives.distributions.kl import log_ratio
from trainer.objectives.policy.ppo import PpoTerms


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
    weights: Tensor | None = None,
) -> PpoTerms:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A l, r = exp(clip(l - lo, +-20)).

    A `clip_low` of 1 means no lower bound. Only the gradient is an estimate, not the value.
    `clipped` is 1.0 where the ratio is outside its bounds, whatever the sign of A. `weights` are
    detached and multiply the result.
    """
    log_ratios = log_ratio(logprobs.detach(), old_logprobs.detach())
    ratio = torch.exp(log_ratios)
    bounded = torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high)
    loss = -bounded * advantages * logprobs
    if weights is not None:
        loss = loss * weights.detach()
    return PpoTerms(
        loss=loss,
        ratio=ratio,
        clipped=(bounded != ratio).to(loss.dtype),
        clipped_lower=torch.zeros_like(ratio),
        kl=-log_ratios,
    )
