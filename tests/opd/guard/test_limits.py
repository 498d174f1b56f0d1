"""Which limits a version breaks."""

from __future__ import annotations

from typing import Any

import pytest

from opd.guard.config import GuardConfig
from opd.guard.limits import breaches, repeated_share
from rollout_bridge.guard.checks import Checked, Figures
from rollout_bridge.rehearsal.journal import GapRow


def checked(**values: Any) -> Checked:
    usual = {
        "version": 1,
        "time": 0.0,
        "passed": 95,
        "asked": 100,
        "kl": 0.1,
        "tokens": 20.0,
        "surprise": 0.5,
        "repeated": 0.1,
    }
    return Checked(**(usual | values))


def gap(value: float, low: float) -> GapRow:
    return GapRow(value=value, low=low, high=2 * value - low, num_samples=32)


START = checked(version=0, passed=96)


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({}, []),
        ({"passed": 80, "failed": {"a": 15, "b": 5}}, []),  # the interval reaches 0.864
        ({"passed": 75, "failed": {"a": 20, "b": 5}}, ["least_passed"]),
        ({"kl": 1.01}, ["max_kl"]),
        ({"kl_last": 0.3, "last_good": 0}, []),
        ({"kl_last": 0.31, "last_good": 0}, ["max_kl_last"]),
        ({"gap": gap(1.4, 0.65), "gap_start": gap(0.2, 0.1)}, []),  # as low as 0.45 above
        ({"gap": gap(1.4, 0.75), "gap_start": gap(0.2, 0.1)}, ["max_gap_rise"]),
        ({"gap": gap(9.0, 8.0), "gap_start": None}, []),
        ({"tokens": 61.0}, ["max_longer"]),
        ({"tokens": 6.0}, ["max_longer"]),
        ({"surprise": 0.04}, ["least_entropy"]),
        ({"surprise": 0.02, "surprise_most": 0.04}, ["least_entropy"]),
        ({"surprise": 0.02, "surprise_most": 0.06}, []),  # a few rare tokens make most of it
        ({"repeated": 0.41}, ["max_repeated"]),
        ({"kl": None, "tokens": None, "surprise": None, "repeated": None, "asked": 0}, []),
        ({"passed": 0, "kl": 9.0, "surprise": 0.0}, ["least_passed", "max_kl", "least_entropy"]),
    ],
)
def test_what_is_broken_is_said(values: dict[str, Any], names: list[str]) -> None:
    found = breaches(GuardConfig(), START, checked(**values))
    assert [name for name in names if not any(f"guard.{name}" in one for one in found)] == []
    assert len(found) == len(names)


def test_answers_that_nobody_could_check_do_not_pass() -> None:
    assert breaches(GuardConfig(), START, checked(passed=48, asked=50, undecided=50)) == []
    [said] = breaches(GuardConfig(), START, checked(passed=0, asked=0, undecided=100))
    assert "100 of 100 answers to canaries could not be checked" in said


def test_the_worst_canaries_are_named() -> None:
    [said] = breaches(GuardConfig(), START, checked(passed=70, failed={"a": 5, "b": 25}))
    assert "wrong most often: b (25), a (5)" in said


def test_limits_can_be_taken_away() -> None:
    none = GuardConfig(
        max_kl=1e3,
        max_kl_last=1e3,
        max_gap_rise=1e3,
        max_longer=1e3,
        least_entropy=0,
        max_repeated=1,
    )
    worst = checked(
        kl=9.0,
        kl_last=9.0,
        gap=gap(9.0, 8.0),
        gap_start=gap(0.2, 0.1),
        tokens=900.0,
        surprise=0.0,
        repeated=1.0,
    )
    assert breaches(none, START, worst) == []
    assert len(breaches(GuardConfig(), START, worst)) == 6


def test_repetition_is_that_of_four_tokens() -> None:
    assert repeated_share([1, 2, 3]) == 0.0
    assert repeated_share([1, 2, 3, 4, 5]) == 0.0
    assert repeated_share([1] * 11) == pytest.approx(7 / 8)
    assert repeated_share([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({}, None),
        ({"kl": 1.01}, "max_kl"),
        ({"tokens": 200.0}, "max_longer"),
        ({"surprise": 0.0}, None),  # training is to make these answers certain
        ({"repeated": 0.41}, "max_repeated"),
    ],
)
def test_recorded_requests_have_the_same_limits_on_drift(
    values: dict[str, float], name: str | None
) -> None:
    start = Figures(kl=0.0, tokens=60.0, surprise=0.5, repeated=0.1)
    now = start.model_copy(update=values)
    found = breaches(GuardConfig(), START, checked(recorded=now, recorded_start=start))
    if name is None:
        assert found == []
    else:
        [said] = found
        assert said.startswith("answers to recorded requests")
        assert f"guard.{name}" in said


def test_recorded_requests_need_canaries() -> None:
    with pytest.raises(ValueError, match=r"guard\.states needs guard\.canaries"):
        GuardConfig(states=8)
