"""Statistics of flat values, each a tensor without dimensions; NaN where there are no values.

Formulas: ALGORITHMS 0 (means) and 4.6 (effective sample size). Selection happened before.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_EPSILON = 1e-8


def mean(values: Tensor) -> Tensor:
    """sum / (count + 1e-8)."""
    if values.numel() == 0:
        return _missing(values)
    return values.sum() / (values.numel() + _EPSILON)


def fraction(chosen: Tensor) -> Tensor:
    """Share of true entries."""
    return chosen.double().mean() if chosen.numel() else _missing(chosen.double())


def largest(values: Tensor) -> Tensor:
    """Maximum."""
    return values.max() if values.numel() else _missing(values)


def smallest(values: Tensor) -> Tensor:
    """Minimum."""
    return values.min() if values.numel() else _missing(values)


def spread(values: Tensor) -> Tensor:
    """Standard deviation of exactly these values, not of a sample."""
    if values.numel() == 0:
        return _missing(values)
    # Centred first: mean(v^2) - mean(v)^2 cancels for weights close to 1.
    return (values - values.mean()).square().mean().sqrt()


def sample_spread(values: Tensor) -> Tensor:
    """Unbiased standard deviation; 0 for one value."""
    if values.numel() == 0:
        return _missing(values)
    return values.std() if values.numel() > 1 else values.new_zeros(())


def effective_share(weights: Tensor) -> Tensor:
    """Effective sample size as a share of the sample: 1 / mean((w / mean(w))^2); 0 if all are 0."""
    share = 1.0 / mean((weights / (mean(weights) + _EPSILON)).square())
    return torch.where(torch.isinf(share), torch.zeros_like(share), share)


def quantile(values: Tensor, share: float) -> Tensor:
    """The smallest value that at least `share` of the values do not exceed."""
    if values.numel() == 0:
        return _missing(values)
    # torch.quantile refuses more than 2^24 values.
    rank = min(max(math.ceil(share * values.numel()), 1), values.numel())
    return values.kthvalue(rank).values


def _missing(values: Tensor) -> Tensor:
    return torch.full((), torch.nan, dtype=values.dtype, device=values.device)
