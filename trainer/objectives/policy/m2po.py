"""M2PO: a clip range that follows from a budget for the second moment of the log-ratios.

Only tokens that a clip can act on count: A > 0 with a ratio above 1, or A < 0 with one below. The
threshold is the largest of their |log r| at which the mean of min((log r)^2, threshold^2) stays
within the budget; floors keep a harsh budget from stopping all learning. A batch within its budget
has no upper bound, and the floor alone below, as in the reference. An ablation of stale
distillation: ALGORITHMS 5.3. Any shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.objectives.distributions.kl import log_ratio

FLOOR_LOW = 0.3
FLOOR_HIGH = 0.5
UNBOUNDED = 1e5
"""The upper margin where the budget asks for none."""
ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class M2poClip:
    """Clip range after the floors, and the second moments without any clip and at the threshold.

    `threshold` is None where the budget asks for no clip.
    """

    clip_low: float
    clip_high: float
    threshold: float | None
    moment_before: float
    moment_after: float


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
    """max(1 - exp(-t), floor_low) and max(exp(t) - 1, floor_high) for the threshold t; within the
    budget max(0, floor_low) and UNBOUNDED. For `ppo_clip`; values at mask 0 are ignored.

    The moments are over the batch given here. Both are 0 without a token that counts. A budget
    below the smallest square has threshold 0 and leaves the moment as it is: the floors decide.
    Raises ValueError for a budget that is not positive or a negative floor.
    """
    if budget <= 0 or floor_low < 0 or floor_high < 0:
        raise ValueError(
            f"m2po: budget must be positive and floors not negative, got {budget}, "
            f"{floor_low}, {floor_high}"
        )
    values = log_ratio(logprobs, old_logprobs)[mask > 0]
    beyond_one = torch.exp(values) - 1.0
    counts = beyond_one * advantages[mask > 0].sign() > 0
    squares = values[counts].square().sort().values.double()
    before = float(squares.mean()) if squares.numel() else 0.0
    if before <= budget + ROUNDING:
        return M2poClip(
            clip_low=floor_low,
            clip_high=max(UNBOUNDED, floor_high),
            threshold=None,
            moment_before=before,
            moment_after=before,
        )
    square = _largest_that_fits(squares, budget)
    threshold = 0.0 if square is None else math.sqrt(max(square - ROUNDING, 0.0))
    return M2poClip(
        clip_low=max(-math.expm1(-threshold), floor_low),
        clip_high=max(math.expm1(threshold), floor_high),
        threshold=threshold,
        moment_before=before,
        moment_after=before if square is None else float(squares.clamp(max=square).mean()),
    )


def _largest_that_fits(squares: Tensor, budget: float) -> float | None:
    """The last of the ascending `squares` that, as a bound for all, keeps their mean below the
    budget; None if even the smallest is too large.
    """
    larger = torch.arange(squares.numel() - 1, -1, -1, device=squares.device)
    bounded = squares.cumsum(0) + (squares - ROUNDING) * larger
    count = int((bounded < budget * squares.numel() - ROUNDING).sum())
    return float(squares[count - 1]) if count else None
