"""The ratio of trainer over rollout engine per token, where both can be compared.

Formula: ALGORITHMS 6.1. Both log-probabilities are at the SAMPLE's temperature.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.objectives.policy.ppo import log_ratio


@torch.no_grad()
def comparable_ratio(train_logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
    """exp(clip(lo - lr, +-20)), 1 where the rollout log-prob is NaN."""
    log_ratios = log_ratio(train_logprobs, rollout_logprobs)
    missing = torch.isnan(rollout_logprobs)
    return torch.exp(torch.where(missing, torch.zeros_like(log_ratios), log_ratios))
