"""From counts of successes by task to pass@k with intervals, and two versions side by side.

All statistics are over tasks: a task's samples are not independent evidence about other tasks, so
the intervals resample tasks, and a comparison uses the same tasks. Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opd.evaluation.figures.beta_binomial import Fit, fit_beta_binomial
from opd.evaluation.figures.pass_at_k import pass_at_k
from rollout_bridge.bootstrap import Estimate, mean_estimate

TaskCounts = Mapping[str, tuple[int, int]]
"""(c, n) by task: successes and samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """The results of one metric: the unbiased pass@k by k, and the Beta-binomial fitted to the
    tasks, which predicts larger k.
    """

    counts: TaskCounts
    pass_at: Mapping[int, Estimate]
    fit: Fit


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptivePasses:
    """One metric after hard tasks had further tries: all tries, the Beta-binomial fitted to them,
    and what each task's posterior expects of k tries, as a mean over tasks by k.

    c/n is too high if the last try is always a success; the likelihood of the tries does not depend
    on why they ended. `expected_at` is None for every k if the fit has no maximum.
    """

    counts: TaskCounts
    fit: Fit
    expected_at: Mapping[int, Estimate | None]

    @property
    def unsolved(self) -> int:
        """Tasks that never passed."""
        return sum(c == 0 for c, _ in self.counts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """One version minus another on the same tasks.

    `better`, `worse` and `equal` are numbers of tasks by their share of successes; `p_value` is
    that of the exact two-sided sign test on the first two.
    """

    difference_at: Mapping[int, Estimate]
    better: int
    worse: int
    equal: int
    p_value: float


def estimate_passes(counts: TaskCounts, ks: Sequence[int], seed: int) -> Passes:
    """pass@k of each of `ks`. Raises ValueError for no tasks, or a k above a task's samples."""
    pass_at = {
        k: mean_estimate(
            [pass_at_k(n, c, k) for c, n in counts.values()],
            list(counts),
            seed=seed,
            bounds=(0.0, 1.0),
        )
        for k in ks
    }
    return Passes(counts=counts, pass_at=pass_at, fit=fit_beta_binomial(list(counts.values())))


def estimate_adaptive(counts: TaskCounts, ks: Sequence[int], seed: int) -> AdaptivePasses:
    """The posterior's pass@k of each of `ks` (ALGORITHMS 8.3). Raises ValueError for no tasks.

    Intervals resample tasks under the one fit. It is valid as far as the tasks' difficulties follow
    a Beta distribution.
    """
    fit = fit_beta_binomial(list(counts.values()))
    expected: dict[int, Estimate | None] = dict.fromkeys(ks)
    for k in ks if fit.converged else ():
        each = [fit.model.posterior(c, n).pass_at_k(k) for c, n in counts.values()]
        expected[k] = mean_estimate(each, list(counts), seed=seed, bounds=(0.0, 1.0))
    return AdaptivePasses(counts=counts, fit=fit, expected_at=expected)


def compare(counts: TaskCounts, against: TaskCounts, ks: Sequence[int], seed: int) -> Paired:
    """`counts` minus `against`. Raises ValueError unless both are of the same tasks."""
    if counts.keys() != against.keys():
        raise ValueError("a paired comparison needs the same tasks on both sides")
    rates = [_rate(counts[task]) - _rate(against[task]) for task in counts]
    better, worse = sum(rate > 0 for rate in rates), sum(rate < 0 for rate in rates)
    return Paired(
        difference_at={
            k: mean_estimate(
                [_pass_at(counts[task], k) - _pass_at(against[task], k) for task in counts],
                list(counts),
                seed=seed,
                bounds=(-1.0, 1.0),
            )
            for k in ks
        },
        better=better,
        worse=worse,
        equal=len(rates) - better - worse,
        p_value=sign_test(better, worse),
    )


def sign_test(better: int, worse: int) -> float:
    """The two-sided p-value of a split at least this uneven, if both were equally likely.

    2 sum_{i <= min} C(n, i) / 2^n with n = better + worse, at most 1: ties are ignored. With one
    sample per task, it is the exact form of McNemar's test. Raises ValueError for negative numbers.
    """
    if better < 0 or worse < 0:
        raise ValueError(f"numbers of tasks cannot be negative, got {better} and {worse}")
    n = better + worse
    tail = sum(math.comb(n, i) for i in range(min(better, worse) + 1))
    return min(1.0, tail * 2 / 2**n)


def _rate(count: tuple[int, int]) -> float:
    return count[0] / count[1]


def _pass_at(count: tuple[int, int], k: int) -> float:
    return pass_at_k(count[1], count[0], k)
