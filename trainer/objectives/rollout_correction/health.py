"""Warnings about a batch from its metrics of rollout correction.

Bounds: ALGORITHMS 4.6. Weights are judged before the cap: under a cap of 2 all ratios may be 5, and
the weights have a mean of 2 and no spread. A metric that is absent or NaN gives no warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bound:
    """A metric is healthy within [low, high]; otherwise `problem` says what that means."""

    metric: str
    problem: str
    low: float = float("-inf")
    high: float = float("inf")


_BOUNDS = (
    _Bound(
        metric="rollout_is_mean_raw", low=0.5, high=2.0, problem="mean importance weight far from 1"
    ),
    _Bound(
        metric="rollout_is_eff_sample_size_unclamped",
        low=0.3,
        problem="weights concentrate on few tokens",
    ),
    _Bound(metric="rollout_is_veto_fraction", high=0.1, problem="too many sequences vetoed"),
    _Bound(
        metric="rollout_is_std_unclamped",
        high=1.0,
        problem="importance weights spread too widely",
    ),
    _Bound(
        metric="kl_fresh", low=-0.1, high=0.1, problem="trainer and rollout engine are far apart"
    ),
    _Bound(metric="kl", low=-0.1, high=0.1, problem="the policy has moved since it sampled these"),
    _Bound(metric="chi2_token", high=1.0, problem="the distribution has shifted severely"),
)


def health_warnings(metrics: Mapping[str, float]) -> tuple[str, ...]:
    """One line per metric out of its bounds; names with or without the prefix `rollout_corr/`.

    `kl_fresh` is over tokens that the newest weights sampled: only those show whether engine and
    trainer agree. If these do not, there is no warning that the policy has moved (`kl`).
    """
    found = {
        bound.metric: f"rollout_corr/{bound.metric} = {value:.4g}: {bound.problem}"
        for bound in _BOUNDS
        if (value := metrics.get(f"rollout_corr/{bound.metric}", metrics.get(bound.metric)))
        is not None
        and (value < bound.low or value > bound.high)
    }
    if "kl_fresh" in found:
        found.pop("kl", None)
    return tuple(found.values())
