"""pass@k over tasks, and two versions on the same tasks."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd.evaluation.figures.estimates import compare, estimate_adaptive, estimate_passes, sign_test
from opd.evaluation.figures.pass_at_k import mean_pass_at_k

COUNTS = {"a": (0, 4), "b": (1, 4), "c": (4, 4), "d": (2, 4)}


def test_estimates_are_the_unbiased_means_over_tasks() -> None:
    passes = estimate_passes(COUNTS, [1, 2, 4], seed=0)
    for k, one in passes.pass_at.items():
        assert one.value == pytest.approx(mean_pass_at_k(list(COUNTS.values()), k))
        assert one.interval is not None
        assert one.interval.low <= one.value <= one.interval.high
    assert passes.pass_at[4].value == 0.75
    # What is expected of one try is what was seen; of more tries than were made, more.
    assert passes.fit.model.pass_at_k(1) == pytest.approx(7 / 16, abs=0.05)
    assert passes.fit.model.pass_at_k(16) > 0.75
    with pytest.raises(ValueError, match="pass@8"):
        estimate_passes(COUNTS, [8], seed=0)


def test_tasks_that_were_tried_on_are_judged_by_their_posterior() -> None:
    counts = {"a": (1, 9), "b": (1, 1), "c": (0, 32), "d": (2, 4)}
    found = estimate_adaptive(counts, [1, 64], seed=0)
    assert found.unsolved == 1
    prior = found.fit.model
    for k, one in found.expected_at.items():
        each = [prior.posterior(c, n).pass_at_k(k) for c, n in counts.values()]
        assert one is not None
        assert one.value == pytest.approx(sum(each) / 4)
        assert one.interval is not None
        assert one.interval.low < one.value < one.interval.high
    # The ratio stopped at a success.
    first = found.expected_at[1]
    assert first is not None
    assert first.value < sum(c / n for c, n in counts.values()) / 4
    alike = estimate_adaptive({"a": (0, 8), "b": (0, 8)}, [1], seed=0)
    assert (alike.unsolved, alike.expected_at) == (2, {1: None})


def test_versions_are_compared_task_by_task() -> None:
    against = {"a": (1, 4), "b": (0, 4), "c": (0, 4), "d": (2, 4)}
    paired = compare(COUNTS, against, [1, 4], seed=0)
    assert (paired.better, paired.worse, paired.equal) == (2, 1, 1)
    assert paired.p_value == sign_test(2, 1)
    assert paired.difference_at[1].value == pytest.approx((-1 + 1 + 4 + 0) / 16)
    assert paired.difference_at[4].value == pytest.approx((-1 + 1 + 1 + 0) / 4)
    mirrored = compare(against, COUNTS, [1, 4], seed=0)
    assert mirrored.difference_at[1].value == -paired.difference_at[1].value
    with pytest.raises(ValueError, match="same tasks"):
        compare(COUNTS, {"a": (1, 4)}, [1], seed=0)


def test_pairing_sees_what_two_intervals_do_not() -> None:
    # Tasks differ much, and one version is a little better on every one of them.
    own = {str(task): (task // 2 + 1 + task % 2, 32) for task in range(32)}
    other = {str(task): (task // 2, 32) for task in range(32)}
    difference = compare(own, other, [1], seed=0).difference_at[1].interval
    assert difference is not None
    assert difference.low > 0
    alone = [estimate_passes(one, [1], seed=0).pass_at[1].interval for one in (own, other)]
    assert alone[0] is not None
    assert alone[1] is not None
    assert alone[0].low < alone[1].high


@pytest.mark.parametrize(
    ("better", "worse", "p"),
    [(0, 0, 1.0), (3, 3, 1.0), (6, 0, 2 / 64), (1, 5, 14 / 64), (9, 1, 22 / 1024)],
)
def test_sign_test_worked_numbers(better: int, worse: int, p: float) -> None:
    assert sign_test(better, worse) == pytest.approx(p)


@given(st.integers(0, 40), st.integers(0, 40))
def test_sign_test_is_the_sum_over_splits_at_least_as_uneven(better: int, worse: int) -> None:
    n = better + worse
    uneven = [math.comb(n, i) for i in range(n + 1) if abs(2 * i - n) >= abs(better - worse)]
    assert sign_test(better, worse) == pytest.approx(sum(uneven) / 2**n)
    assert sign_test(better, worse) == sign_test(worse, better)


def test_sign_test_refuses_negative_numbers() -> None:
    with pytest.raises(ValueError, match="negative"):
        sign_test(-1, 2)
