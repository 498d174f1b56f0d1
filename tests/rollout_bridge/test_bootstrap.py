"""Intervals: they cover what they should, draw clusters whole, and admit what they cannot say."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_bridge.bootstrap import Interval, mean_estimate


def test_equal_seeds_give_equal_intervals_around_the_mean() -> None:
    values = [number / 30 for number in range(31)]
    first = mean_estimate(values, range(31), seed=3)
    assert first == mean_estimate(values, range(31), seed=3)
    assert first.value == pytest.approx(0.5)
    assert first.interval is not None
    assert 0.38 < first.interval.low < 0.42
    assert 0.58 < first.interval.high < 0.62
    assert first != mean_estimate(values, range(31), seed=4)


def test_intervals_cover_the_true_mean_and_only_if_clusters_stay_whole() -> None:
    rng = np.random.default_rng(0)
    covered = {"clustered": 0, "apart": 0}
    for trial in range(200):
        # 40 clusters of 5 values that differ little within a cluster.
        values = (rng.normal(2.0, 1.0, (40, 1)) + rng.normal(0.0, 0.2, (40, 5))).ravel().tolist()
        for name, clusters in (
            ("clustered", [i // 5 for i in range(200)]),
            ("apart", list(range(200))),
        ):
            interval = mean_estimate(values, clusters, seed=trial, resamples=400).interval
            assert interval is not None
            covered[name] += interval.low <= 2.0 <= interval.high
    assert 0.88 <= covered["clustered"] / 200 <= 0.99
    assert covered["apart"] / 200 < 0.75


def test_a_cluster_weighs_by_its_values() -> None:
    assert mean_estimate([1.0, 1.0, 1.0, 0.0], ["a", "a", "a", "b"], seed=0).value == 0.75


def test_values_without_spread_get_what_their_number_excludes() -> None:
    passed = mean_estimate([1.0] * 60, range(60), seed=0, bounds=(0.0, 1.0)).interval
    assert passed is not None
    # The rule of three: about 3 / n.
    assert passed.low == pytest.approx(0.05 ** (1 / 60))
    assert 1 - passed.low == pytest.approx(3 / 60, abs=0.003)
    assert passed.high == 1.0
    failed = mean_estimate([0.0] * 60, range(60), seed=0, bounds=(0.0, 1.0)).interval
    assert failed is not None
    assert (failed.low, failed.high) == (0.0, pytest.approx(1 - passed.low))
    equal = mean_estimate([0.0] * 60, range(60), seed=0, bounds=(-1.0, 1.0)).interval
    assert equal is not None
    assert (equal.low, equal.high) == (pytest.approx(-failed.high), pytest.approx(failed.high))
    assert mean_estimate([0.0] * 60, range(60), seed=0).interval is None


def test_one_cluster_has_a_mean_and_no_interval() -> None:
    one = mean_estimate([0.0, 1.0], ["a", "a"], seed=0, bounds=(0.0, 1.0))
    assert (one.value, one.interval) == (0.5, None)


def test_what_cannot_be_averaged_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        mean_estimate([], [], seed=0)
    with pytest.raises(ValueError, match="2 values but 1 names"):
        mean_estimate([0.0, 1.0], ["a"], seed=0)
    with pytest.raises(ValueError, match="outside"):
        mean_estimate([0.0, 1.5], ["a", "b"], seed=0, bounds=(0.0, 1.0))
    with pytest.raises(ValueError, match="outside"):
        mean_estimate([0.0, float("nan")], ["a", "b"], seed=0, bounds=(0.0, 1.0))
    with pytest.raises(ValueError, match="interval from 1"):
        Interval(low=1.0, high=0.0)
