"""What is measured about a version, as numbers with intervals. Pure functions.

The gap is the reverse KL per token, E[log pi - log q] over samples of the policy: 0 where the
policy answers as the teacher would under the hint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from records.types import Logprobs
from rollout_bridge.bootstrap import mean_estimate

_Z = 1.96
_ENOUGH_STATES = 3
_RESAMPLES = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredAnswer:
    """log pi - log q [R] of one answer at one state, in nats."""

    turn_id: str
    differences: Logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Mean over tokens, in nats, with its 95% interval; `num_samples` answers."""

    value: float
    low: float
    high: float
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """`hits` of `count`, and Wilson's 95% interval (E. B. Wilson, JASA 22, 1927)."""

    hits: int
    count: int

    @property
    def value(self) -> float:
        """The share. Raises ValueError if there are no answers."""
        if self.count == 0:
            raise ValueError("no answers to take a rate of")
        return self.hits / self.count

    @property
    def interval(self) -> tuple[float, float]:
        """Its 95% interval."""
        n, p = self.count, self.value
        centre = (p + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
        half = _Z * math.sqrt(p * (1 - p) / n + _Z**2 / (4 * n * n)) / (1 + _Z**2 / n)
        return max(0.0, centre - half), min(1.0, centre + half)


def gap_of(measured: Sequence[MeasuredAnswer], seed: int) -> Gap | None:
    """The mean over the tokens of all answers; None where they allow no interval.

    Resampled by states, which differ more than the answers at one of them; by answers where there
    are fewer than three states: the interval is then about these states only.
    """
    measured = [one for one in measured if len(one.differences)]
    if len(measured) < 2:
        return None
    by_state = len({one.turn_id for one in measured}) >= _ENOUGH_STATES
    values = np.concatenate([one.differences for one in measured]).astype(np.float64).tolist()
    clusters = [
        one.turn_id if by_state else str(index)
        for index, one in enumerate(measured)
        for _ in range(len(one.differences))
    ]
    estimate = mean_estimate(values, clusters, seed=seed, resamples=_RESAMPLES)
    low = high = estimate.value
    if estimate.interval is not None:
        low, high = estimate.interval.low, estimate.interval.high
    return Gap(value=estimate.value, low=low, high=high, num_samples=len(measured))


@dataclass(frozen=True, slots=True, kw_only=True)
class Uptake:
    """In how many answers at a hint's states what it asks is done without being asked for: `now` by
    the policy, `start` by the start model, which does it in `hinted` answers with the hint.
    """

    now: Rate
    start: Rate
    hinted: Rate

    @property
    def is_known(self) -> bool:
        """Whether the hint does anything here, beyond the chance of these answers: otherwise there
        is no way to go, and no share of it.
        """
        return self.hinted.interval[0] > self.start.interval[1]

    @property
    def share(self) -> float:
        """How much of the way from `start` to `hinted` is gone, if that `is_known`."""
        return (self.now.value - self.start.value) / (self.hinted.value - self.start.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Obedience:
    """Obedience to open wishes at one version: `followed` of `asked` answers, plus `abstained` on
    which the judge did not decide. Of as many answers, the start model would follow in `before`.
    """

    followed: int
    asked: int
    abstained: int
    before: float

    @property
    def rate(self) -> Rate:
        """As a rate."""
        return Rate(hits=self.followed, count=self.asked)

    @property
    def is_judged(self) -> bool:
        """Whether the judge decided on at least half of the answers, as for the start model."""
        return self.asked >= self.abstained


def summed(parts: Sequence[Obedience]) -> Obedience | None:
    """All answers together; None without any."""
    if not parts:
        return None
    return Obedience(
        followed=sum(one.followed for one in parts),
        asked=sum(one.asked for one in parts),
        abstained=sum(one.abstained for one in parts),
        before=sum(one.before for one in parts),
    )


def is_obedient(one: Obedience, floor: float) -> bool:
    """Whether one version follows enough open wishes: at least the share `floor` of the start's.
    Answers that the judge mostly cannot decide on are not obedient.
    """
    return one.is_judged and one.followed >= floor * one.before


def falls_clearly_short(one: Obedience, floor: float, errors: float) -> bool:
    """Whether a version falls short of the share `floor` of the start's open wishes by more than
    `errors` binomial standard errors of as many answers.
    """
    if one.asked == 0:
        return False
    least = floor * one.before / one.asked
    error = math.sqrt(least * (1.0 - least) / one.asked)
    return one.followed / one.asked < least - errors * error


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledObedience:
    """Obedience over some versions, and the least that is allowed; `before` is the start's rate."""

    rate: Rate
    before: float
    floor: float

    @property
    def passed(self) -> bool:
        """Whether it may still be as high as required."""
        return self.rate.interval[1] >= self.floor


def pooled(latest: Sequence[Obedience], *, floor: float) -> PooledObedience | None:
    """Obedience over these versions; `floor` is a share of the start's. None without answers."""
    all_ = summed(latest)
    if all_ is None or not all_.asked:
        return None
    before = all_.before / all_.asked
    return PooledObedience(rate=all_.rate, before=before, floor=floor * before)
