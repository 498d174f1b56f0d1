"""Options of rollout correction, validated on construction, what its modes mean, and within which
bounds its metrics are healthy.

Facts: ALGORITHMS 4.1 to 4.6 and 9 items 9 to 11. Every bound on a ratio is on r = trainer over
rollout engine. It imports no torch, because the configuration builds these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trainer.objectives.names import unknown_name

Level = Literal["token", "sequence"]
LEVELS = ("token", "sequence")
STATISTICS = (
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
)
STATISTIC_ALIASES = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectionRule:
    """Keeps a token or a sequence while a statistic of its ratios lies within bounds.

    `statistic` is one of STATISTICS (ALGORITHMS 4.3). For k1, `lower` and `upper` bound r (per
    token, product, or geometric mean). For k2 and k3, `upper` bounds the divergence and `lower` is
    None. Build one with `rejection_rule`, which knows the aliases and the default of `lower`.
    """

    statistic: str
    upper: float
    lower: float | None = None

    def __post_init__(self) -> None:
        if self.statistic not in STATISTICS:
            raise unknown_name("rejection statistic", self.statistic, STATISTICS)
        if not self.upper > 0:
            raise ValueError(f"{self.statistic}: the upper bound must be above 0, got {self.upper}")
        if not self.bounds_ratio:
            if self.lower is not None:
                raise ValueError(f"{self.statistic} has an upper bound only, got {self.lower}")
        elif self.lower is None or not 0 <= self.lower <= self.upper:
            raise ValueError(
                f"{self.statistic}: the lower bound must be between 0 and {self.upper}, "
                f"got {self.lower}"
            )

    @property
    def bounds_ratio(self) -> bool:
        """Whether the bounds are on the ratio itself (k1)."""
        return self.estimator == "k1"

    @property
    def estimator(self) -> str:
        """`k1`, `k2` or `k3`."""
        return self.statistic.rpartition("_")[2]

    @property
    def reduction(self) -> str:
        """`token`, `seq_sum`, `seq_mean` or `seq_max`."""
        return self.statistic.rpartition("_")[0]


def rejection_rule(name: str, upper: float | None, lower: float | None = None) -> RejectionRule:
    """A rule by the name of its statistic or an alias (`token`, `sequence`, `geometric`).

    `lower` defaults to 1/upper where the bounds are on the ratio. Raises ValueError for an unknown
    name and for a rule without a threshold, which never falls back to the one of the weights.
    """
    statistic = STATISTIC_ALIASES.get(name, name)
    if statistic not in STATISTICS:
        raise unknown_name("rejection option", name, (*STATISTICS, *STATISTIC_ALIASES))
    if upper is None:
        raise ValueError(f"rejection option {name!r} has no threshold; set one")
    if lower is None and statistic.endswith("_k1") and upper > 0:
        lower = 1.0 / upper
    return RejectionRule(statistic=statistic, upper=upper, lower=lower)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCorrectionSettings:
    """How samples of a policy other than the trainer's are corrected."""

    mode: Mode = "decoupled"
    """Which policies are compared, and whether weights are applied: `MODES`."""

    importance_level: Level | None = "sequence"
    """Weights per token or per sequence (the product of its ratios); None: no weights."""

    importance_upper: float = 2.0
    """Weights are truncated to this."""

    importance_lower: float | None = None
    """If set, weights outside [lower, upper] become 0 instead of truncated; the mask stays."""

    post_tool_upper: float | None = None
    """If set, the upper bound of weights after a tool result, where ratios run away first."""

    is_mask_mode: bool = False
    """Leave weights above the upper bound as they are, for use with a rejection rule."""

    batch_normalize: bool = False
    """Divide the weights by their mean over the batch, after truncation."""

    rejections: tuple[RejectionRule, ...] = ()
    """A token stays only if every rule keeps it."""

    clamp_before_sum: bool = False
    """In rejection by sequence, clamp each log-ratio to +-20 instead of their sum or mean."""

    veto_threshold: float | None = None
    """A sequence with any token whose ratio is below this, or is not a number, is rejected."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise unknown_name("mode", self.mode, MODES)
        if self.importance_level is not None and self.importance_level not in LEVELS:
            raise unknown_name("level of importance weights", self.importance_level, LEVELS)
        if not (self.importance_upper > 0 and math.isfinite(self.importance_upper)):
            raise ValueError(
                f"importance_upper must be positive and finite, got {self.importance_upper}"
            )
        self._check_lower()
        self._check_post_tool()
        if self.veto_threshold is not None and not self.veto_threshold > 0:
            raise ValueError(
                f"veto_threshold must be above 0, got {self.veto_threshold}; None turns it off"
            )
        names = [rule.statistic for rule in self.rejections]
        if len(names) != len(set(names)):
            raise ValueError(f"a rejection statistic occurs twice: {', '.join(names)}")

    def _check_lower(self) -> None:
        if self.importance_lower is None:
            return
        if not 0 <= self.importance_lower < self.importance_upper:
            raise ValueError(
                f"importance_lower must be at least 0 and below importance_upper "
                f"{self.importance_upper}, got {self.importance_lower}"
            )
        if self.is_mask_mode:
            raise ValueError("importance_lower zeroes weights, is_mask_mode keeps them: choose one")

    def _check_post_tool(self) -> None:
        if self.post_tool_upper is None:
            return
        low = self.importance_lower
        low = 1.0 / self.importance_upper if low is None else low
        if not low < self.post_tool_upper <= self.importance_upper:
            raise ValueError(
                f"post_tool_upper must be above {low:g} and at most importance_upper "
                f"{self.importance_upper}, got {self.post_tool_upper}"
            )
        is_applied = self.importance_level is not None and MODES[self.mode].applies_weights
        if self.is_mask_mode or not is_applied:
            raise ValueError(
                "post_tool_upper bounds weights that are applied: unset is_mask_mode, set "
                "importance_level, and mode decoupled or pure_is"
            )


Mode = Literal["decoupled", "bypass", "pure_is"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeTraits:
    """What a mode compares with the rollout engine and what its loss does with the result.

    `train_logprobs` says which log-probs to pass to `correct_rollout`: those of the start of the
    batch (`old`), or the current policy's, recomputed for every update (`current`).
    `clip_anchor` is the denominator of the clipped ratio; None: there is no clipping.
    """

    train_logprobs: Literal["old", "current"]
    clip_anchor: Literal["old", "rollout"] | None
    applies_weights: bool


MODES: Mapping[str, ModeTraits] = {
    "decoupled": ModeTraits(train_logprobs="old", clip_anchor="old", applies_weights=True),
    # The clipped ratio is already current over rollout: weights would apply it twice.
    "bypass": ModeTraits(train_logprobs="current", clip_anchor="rollout", applies_weights=False),
    "pure_is": ModeTraits(train_logprobs="current", clip_anchor=None, applies_weights=True),
}


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
