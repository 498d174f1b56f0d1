"""IcePop: importance weights outside their bounds are zeroed instead of capped.

Formula: ALGORITHMS 4.1. The mask, and with it every denominator, stays as it is. Any shape.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.objectives.policy.truncated_is import TruncatedWeights, comparable_ratio


@torch.no_grad()
def icepop_weights(
    train_logprobs: Tensor, rollout_logprobs: Tensor, *, lower: float, upper: float
) -> TruncatedWeights:
    """w = exp(clip(lo - lr, +-20)) if lower <= w <= upper, else 0; 1 where the rollout's is NaN.

    `capped` is 1.0 where a weight was zeroed. Raises ValueError for bounds that keep nothing.
    """
    if upper <= 0 or lower < 0 or lower > upper:
        raise ValueError(f"icepop: needs 0 <= lower <= upper and upper > 0, got {lower}, {upper}")
    ratio = comparable_ratio(train_logprobs, rollout_logprobs)
    inside = (ratio >= lower) & (ratio <= upper)
    return TruncatedWeights(
        weights=torch.where(inside, ratio, torch.zeros_like(ratio)),
        ratio=ratio,
        capped=(~inside).to(ratio.dtype),
    )
