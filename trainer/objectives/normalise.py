"""Advantages of one source on a scale of their own: mean 0 and standard deviation 1.

Formula: ALGORITHMS 7.3. Statistics are those of the selected tokens alone, so that sources on other
scales (log-prob gaps, rewards) are normalised separately and combined afterwards. Shapes: [B, T],
or any shape where no row matters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MIN_COUNT = 2
MIN_STD = 1e-6
EPSILON = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalised:
    """`values` [B, T], 0 where nothing was selected; the rest are scalars.

    `mean` is NaN without values, `std` (unbiased) NaN for fewer than two. `applied` is False where
    the values were left as they are; `num_unnormalised` then counts them, else it is 0.
    """

    values: Tensor
    mean: Tensor
    std: Tensor
    count: int
    applied: bool

    @property
    def num_unnormalised(self) -> int:
        """How many values were left as they are."""
        return 0 if self.applied else self.count


@torch.no_grad()
def normalise(
    values: Tensor,
    selected: Tensor,
    *,
    epsilon: float = EPSILON,
    min_std: float = MIN_STD,
) -> Normalised:
    """(value - mean) / (std + epsilon) of the values whose `selected` is above 0; 0 elsewhere.

    Fewer than two values, or a std below `min_std`, leave them unnormalised. Raises ValueError for
    a selected value that is not finite.
    """
    chosen = selected > 0
    picked = values[chosen]
    if not bool(torch.isfinite(picked).all()):
        raise ValueError("a selected value is not finite; take it out of the mask before")
    clean = torch.where(chosen, values, torch.zeros_like(values))
    count = int(picked.numel())
    nan = values.new_full((), float("nan"))
    mean = picked.mean() if count else nan
    std = picked.std() if count >= MIN_COUNT else nan
    applied = count >= MIN_COUNT and float(std) >= min_std
    if applied:
        scaled = (clean - mean) / (std + epsilon)
        clean = torch.where(chosen, scaled, torch.zeros_like(scaled))
    return Normalised(values=clean, mean=mean, std=std, count=count, applied=applied)
