"""Counter-lessons fill steps while open wishes are done less often than at the start."""

from dataclasses import replace
from pathlib import Path

import pytest

from records.share import LessonShares
from trainer.rehearsal.journal import Journal, ObedienceRow, VersionRow
from trainer.rehearsal.recovery import COUNTER_SHARE, shares_after, shares_now

SHARES = LessonShares()


def a_row(followed: int, asked: int = 64, version: int = 1) -> VersionRow:
    obedience = ObedienceRow(followed=followed, asked=asked, abstained=0, before=float(asked))
    return VersionRow(
        time=0.0,
        version=version,
        turns=0,
        objections=0,
        hints=(),
        obedience=obedience,
        pooled=None,
        keep=None,
        lessons={},
    )


@pytest.mark.parametrize(("followed", "counter"), [(64, 0.375), (61, 0.375), (60, 0.75)])
def test_a_step_after_a_fall_is_mostly_counter_lessons(followed: int, counter: float) -> None:
    found = shares_after(a_row(followed), SHARES, 0.95)
    assert found == replace(SHARES, counter=counter)
    assert found.of(16)[1] == 2, "what no hint speaks of is kept as before"


def test_what_was_not_measured_changes_nothing() -> None:
    assert shares_after(None, SHARES, 0.95) == SHARES
    assert shares_after(a_row(0, asked=0), SHARES, 0.95) == SHARES


def test_the_newest_version_counts(tmp_path: Path) -> None:
    assert shares_now(tmp_path, SHARES, 0.95) == SHARES
    journal = Journal(tmp_path)
    journal.add(a_row(40))
    assert shares_now(tmp_path, SHARES, 0.95).counter == COUNTER_SHARE
    journal.add(a_row(64, version=2))
    assert shares_now(tmp_path, SHARES, 0.95) == SHARES
