"""REINFORCE with a detached importance weight: no clip, no policy in between.

Formula: ALGORITHMS 4.5 (iii). The weight is of the CURRENT policy over the one that sampled, made
anew in each micro-batch by `rollout_correction` in its mode "pure_is"; what that rejects leaves the
mask. Any shape; it knows no masks and no reduction.
"""

from __future__ import annotations

from torch import Tensor


def pure_is(logprobs: Tensor, advantages: Tensor, weights: Tensor | None = None) -> Tensor:
    """-A l sg(w) per token; w is 1 without weights.

    A weight that kept its gradient would add w' l to it, which can turn its sign (9 item 12).
    """
    loss = -advantages * logprobs
    return loss if weights is None else loss * weights.detach()
