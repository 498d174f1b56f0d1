"""A KL term that stays a loss over several epochs has an importance ratio of its own.

Formula: ALGORITHMS 6.10. Any shape; it knows no masks and no reduction.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.objectives.policy.ppo import log_ratio


def kl_with_ratio(
    kl: Tensor,
    logprobs: Tensor,
    old_logprobs: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """min(rho k, clip(rho, 1 - clip_low, 1 + clip_high) k), rho = exp(clip(l - lo, +-20)).

    Both `k` (per token, of ALGORITHMS 2.1) and rho carry their gradients. At rho = 1 it is k with
    the gradient of rho k.
    """
    ratio = torch.exp(log_ratio(logprobs, old_logprobs))
    return torch.minimum(ratio * kl, torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high) * kl)
