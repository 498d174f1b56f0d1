"""Intervals for a mean, by resampling whole clusters.

Percentile bootstrap (B. Efron and R. Tibshirani, An Introduction to the Bootstrap, 1993, chapter
13); what belongs together (the samples of one task, the states of one session) is drawn together
(C. Field and A. Welsh, Bootstrapping clustered data, Journal of the Royal Statistical Society B 69,
2007). Pure functions of numbers; equal seeds give equal intervals.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
RESAMPLES = 10_000
_BLOCK = 500
"""Resamples that are drawn at a time, to limit memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """From `low` to `high`, in the unit of what was averaged."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ValueError(f"an interval from {self.low} to {self.high}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean with its interval; None where the values do not allow one."""

    value: float
    interval: Interval | None


def mean_estimate(
    values: Sequence[float],
    clusters: Sequence[Hashable],
    *,
    seed: int,
    bounds: tuple[float, float] | None = None,
    resamples: int = RESAMPLES,
) -> Estimate:
    """The mean of `values` with its 95% interval; `clusters` names the cluster of each value.

    There is no interval for fewer than two clusters. Resampling values that are all the same, such
    as only successes, would give an interval without width. With `bounds`, within which every value
    must lie, it is instead what this many clusters can exclude: another value has a probability of
    at most 1 - 0.05^(1/clusters) per cluster (the "rule of three"). Without bounds there is none.

    Raises ValueError for no values, values outside the bounds, or lists of different lengths.
    """
    if not values:
        raise ValueError("a mean of no values")
    numbers = np.asarray(values, dtype=np.float64)
    if bounds is not None and not ((numbers >= bounds[0]) & (numbers <= bounds[1])).all():
        raise ValueError(f"a value lies outside {bounds}")
    sums, sizes = _cluster_sums(numbers, clusters)
    value = float(sums.sum() / sizes.sum())
    if len(sums) < 2:
        return Estimate(value=value, interval=None)
    if (numbers == numbers[0]).all():
        return Estimate(value=value, interval=_without_spread(value, len(sums), bounds))
    means = _resampled_means(sums, sizes, resamples, seed)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value=value, interval=Interval(low=float(low), high=float(high)))


def _cluster_sums(
    values: NDArray[np.float64], clusters: Sequence[Hashable]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sum and number of values of each cluster."""
    places: dict[Hashable, int] = {}
    index = [places.setdefault(name, len(places)) for name in clusters]
    if len(index) != len(values):
        raise ValueError(f"{len(values)} values but {len(index)} names of clusters")
    sums = np.bincount(index, weights=values, minlength=len(places))
    sizes = np.bincount(index, minlength=len(places))
    return sums.astype(np.float64), sizes.astype(np.float64)


def _resampled_means(
    sums: NDArray[np.float64], sizes: NDArray[np.float64], resamples: int, seed: int
) -> NDArray[np.float64]:
    generator = np.random.default_rng(seed)
    blocks = []
    for start in range(0, resamples, _BLOCK):
        shape = (min(_BLOCK, resamples - start), len(sums))
        drawn = generator.integers(0, len(sums), size=shape)
        blocks.append(sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1))
    return np.concatenate(blocks)


def _without_spread(
    value: float, num_clusters: int, bounds: tuple[float, float] | None
) -> Interval | None:
    if bounds is None:
        return None
    other = 1 - (1 - LEVEL) ** (1 / num_clusters)
    low, high = bounds
    return Interval(low=value - other * (value - low), high=value + other * (high - value))
