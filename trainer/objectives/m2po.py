"""M2PO: a clip range that follows from a budget for the second moment of the log-ratios.

Only tokens that a clip can act on count: A > 0 with a ratio above 1, or A < 0 with one below. The
threshold is the largest of their |log r| at which the mean of min((log r)^2, threshold^2) stays
within the budget; floors keep a harsh budget from stopping all learning. An ablation of stale
distillation: ALGORITHMS 5.3. Any shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.objectives.aggregate import selected
from trainer.objectives.kl import LOG_RATIO_LIMIT
from trainer.objectives.ppo import PpoTerms, log_ratio, ppo_clip

FLOOR_LOW = 0.3
FLOOR_HIGH = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class M2poClip:
    """Clip range after the floors, and the second moments without any clip and at the threshold.

    `threshold` is 20, the limit of every log-ratio, where the budget asks for no clip.
    """

    clip_low: float
    clip_high: float
    threshold: float
    moment_before: float
    moment_after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class M2poTerms:
    """The surrogate under the clip that this batch got. `ppo.loss` is 0 at mask 0."""

    ppo: PpoTerms
    clip: M2poClip


def m2po(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    budget: float = 0.04,
    floor_low: float = FLOOR_LOW,
    floor_high: float = FLOOR_HIGH,
    weights: Tensor | None = None,
) -> M2poTerms:
    """PPO(l, lo) under `m2po_clip`; values at mask 0 are not looked at."""
    logprobs, old_logprobs = selected(logprobs, mask), selected(old_logprobs, mask)
    advantages = selected(advantages, mask)
    clip = m2po_clip(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        budget=budget,
        floor_low=floor_low,
        floor_high=floor_high,
    )
    terms = ppo_clip(
        logprobs,
        old_logprobs,
        advantages,
        clip_low=clip.clip_low,
        clip_high=clip.clip_high,
        weights=None if weights is None else selected(weights, mask),
    )
    return M2poTerms(ppo=terms, clip=clip)


@torch.no_grad()
def m2po_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    budget: float = 0.04,
    floor_low: float = FLOOR_LOW,
    floor_high: float = FLOOR_HIGH,
) -> M2poClip:
    """max(1 - exp(-t), floor_low) and max(exp(t) - 1, floor_high) for the threshold t.

    The moments are over the batch given here. Both are 0 without a token that counts. Raises
    ValueError for a budget that is not positive or a negative floor.
    """
    if budget <= 0 or floor_low < 0 or floor_high < 0:
        raise ValueError(
            f"m2po: budget must be positive and floors not negative, got {budget}, "
            f"{floor_low}, {floor_high}"
        )
    values = log_ratio(logprobs, old_logprobs)[mask > 0]
    signs = advantages[mask > 0].sign()
    squares = values[values * signs > 0].square().sort().values
    threshold = _threshold(squares, budget)
    # The token that sets the threshold is clipped, whichever way its ratio is rounded.
    edge = threshold - 4.0 * torch.finfo(values.dtype).eps * (1.0 + threshold)
    return M2poClip(
        clip_low=max(-math.expm1(-edge), floor_low),
        clip_high=max(math.expm1(edge), floor_high),
        threshold=threshold,
        moment_before=_mean(squares),
        moment_after=_mean(squares.clamp(max=threshold**2)),
    )


def _threshold(squares: Tensor, budget: float) -> float:
    """The largest square that can be a bound for all, by its root; 20 if none is needed, 0 if even
    the smallest is too large. `squares` are in ascending order.
    """
    if _mean(squares) <= budget:
        return LOG_RATIO_LIMIT
    larger = torch.arange(squares.numel() - 1, -1, -1, device=squares.device)
    fits = (squares.cumsum(0) + squares * larger) / squares.numel() <= budget
    count = int(fits.sum())
    return math.sqrt(float(squares[count - 1])) if count else 0.0


def _mean(squares: Tensor) -> float:
    return float(squares.mean()) if squares.numel() else 0.0
