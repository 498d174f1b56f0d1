"""Truncated importance weights per token: trainer over rollout engine.

Formula: ALGORITHMS 6.1 and 4.1 (token level). Both log-probabilities are at the SAMPLE's
temperature. Weights are detached; they multiply the clipped surrogate and are never folded into its
ratio.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.objectives.kl import LOG_RATIO_LIMIT


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncatedWeights:
    """Detached, shaped like the inputs: weight after the cap, ratio before it, 1.0 where capped."""

    weights: Tensor
    ratio: Tensor
    capped: Tensor


@torch.no_grad()
def truncated_weights(
    train_logprobs: Tensor, rollout_logprobs: Tensor, *, cap: float
) -> TruncatedWeights:
    """min(exp(clip(lo - lr, +-20)), cap); 1 where the rollout log-prob is NaN (not comparable)."""
    if cap <= 0:
        raise ValueError(f"the cap of importance weights must be positive, got {cap}")
    log_ratio = torch.clamp(train_logprobs - rollout_logprobs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    log_ratio = torch.where(torch.isnan(rollout_logprobs), torch.zeros_like(log_ratio), log_ratio)
    ratio = torch.exp(log_ratio)
    return TruncatedWeights(
        weights=ratio.clamp(max=cap), ratio=ratio, capped=(ratio > cap).to(ratio.dtype)
    )
