"""Truncated importance weights per token: trainer over rollout engine.

Formula: ALGORITHMS 6.1 and 4.1 (token level). Both log-probabilities are at the SAMPLE's
temperature. Weights are detached; they multiply the clipped surrogate and are never folded into its
ratio.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.objectives.policy.ppo import log_ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncatedWeights:
    """Detached, shaped like the inputs: weight inside the bounds, ratio before them, 1.0 where they
    acted.
    """

    weights: Tensor
    ratio: Tensor
    capped: Tensor

    @property
    def distance(self) -> Tensor:
        """|ratio - 1|."""
        return (self.ratio - 1.0).abs()


@torch.no_grad()
def truncated_weights(
    train_logprobs: Tensor, rollout_logprobs: Tensor, *, cap: float, lower: float = 0.0
) -> TruncatedWeights:
    """clip(exp(clip(lo - lr, +-20)), lower, cap); 1 where the rollout log-prob is NaN (not
    comparable), even if that is outside the bounds. Raises ValueError for bounds out of order.
    """
    if cap <= 0:
        raise ValueError(f"the cap of importance weights must be positive, got {cap}")
    if lower < 0 or lower > cap:
        raise ValueError(
            f"the lower bound of importance weights must be in [0, {cap}], got {lower}"
        )
    ratio = comparable_ratio(train_logprobs, rollout_logprobs)
    missing = torch.isnan(rollout_logprobs)
    weights = torch.where(missing, ratio, ratio.clamp(min=lower, max=cap))
    return TruncatedWeights(weights=weights, ratio=ratio, capped=(weights != ratio).to(ratio.dtype))


@torch.no_grad()
def comparable_ratio(train_logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
    """exp(clip(lo - lr, +-20)), 1 where the rollout log-prob is NaN."""
    log_ratios = log_ratio(train_logprobs, rollout_logprobs)
    missing = torch.isnan(rollout_logprobs)
    return torch.exp(torch.where(missing, torch.zeros_like(log_ratios), log_ratios))
