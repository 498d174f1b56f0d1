"""RUN/guard.jsonl, and what waits for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_bridge.guard import waiting
from rollout_bridge.guard.checks import (
    FILE,
    Checked,
    add_check,
    last_check,
    never_served,
    read_checks,
)
from rollout_bridge.guard.waiting import CheckWait
from rollout_bridge.rehearsal.journal import GapRow


def a_check(version: int) -> Checked:
    return Checked(
        version=version,
        time=1.0,
        passed=1,
        asked=2,
        kl=None,
        tokens=3.0,
        surprise=0.5,
        repeated=0.0,
    )


def moved(version: int) -> Checked:
    """A check of a version that has trained."""
    values = {"low": 0.1, "high": 0.3, "num_samples": 32}
    return a_check(version).model_copy(
        update={
            "kl": 0.25,
            "kl_last": 0.125,
            "last_good": version - 1,
            "gap": GapRow(value=0.2, **values),
            "gap_start": GapRow(value=0.7, **values),
        }
    )


def test_lines_are_read_back_and_an_unfinished_one_is_cut(tmp_path: Path) -> None:
    assert read_checks(tmp_path) == []
    assert last_check(tmp_path) is None
    add_check(tmp_path, a_check(0))
    with (tmp_path / FILE).open("a") as file:
        file.write('{"version": 1, "ti')
    assert last_check(tmp_path) == a_check(0)
    add_check(tmp_path, a_check(1))
    add_check(tmp_path, moved(2))
    assert read_checks(tmp_path) == [a_check(0), a_check(1), moved(2)]


def test_a_version_waits_for_its_check_and_the_start_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "_SAY_EVERY_S", 0.0)
    wait = CheckWait(tmp_path, is_on=True)
    assert not wait.awaits(0)
    assert wait.awaits(1)
    add_check(tmp_path, a_check(0))
    assert wait.awaits(1)
    assert "the guard has not checked version 1" in caplog.text
    add_check(tmp_path, a_check(1).model_copy(update={"breaches": ["too bad"]}))
    assert wait.awaits(1)
    add_check(tmp_path, a_check(1))
    assert not wait.awaits(1)
    assert wait.awaits(2)
    assert not CheckWait(tmp_path, is_on=False).awaits(2)


def test_a_version_keeps_its_verdict_when_another_is_checked(tmp_path: Path) -> None:
    wait = CheckWait(tmp_path, is_on=True)
    add_check(tmp_path, a_check(2))
    assert not wait.awaits(2)
    # An older version that somebody pinned is checked later.
    add_check(tmp_path, a_check(1))
    assert not wait.awaits(2)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"version": 3, "ti')
    assert wait.awaits(3)
    add_check(tmp_path, a_check(3))
    assert not wait.awaits(3)


def test_what_failed_before_it_served_and_did_not_pass_later(tmp_path: Path) -> None:
    failed = {"breaches": ["bad"]}
    rows = [
        a_check(1).model_copy(update=failed),
        a_check(2).model_copy(update=failed | {"staged": True}),
        a_check(3).model_copy(update=failed | {"staged": True}),
        a_check(3).model_copy(update={"staged": True}),
        a_check(4).model_copy(update={"staged": True}),
    ]
    assert never_served(rows) == {2}
