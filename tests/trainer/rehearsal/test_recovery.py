"""Counter-lessons fill steps while open wishes are done less often than at the start."""

from dataclasses import replace

import pytest

from records.share import LessonShares
from tests.trainer.rehearsal.builders import a_version, asked
from trainer.rehearsal.recovery import shares_after

SHARES = LessonShares()


@pytest.mark.parametrize(("followed", "counter"), [(64, 0.375), (61, 0.375), (60, 0.7)])
def test_a_step_after_a_fall_is_mostly_counter_lessons(followed: int, counter: float) -> None:
    found = shares_after(a_version(1, asked(followed, 64)), SHARES, 0.95)
    assert found == replace(SHARES, counter=counter)
    assert found.of(24)[1] == SHARES.of(24)[1] == 6, "what no hint speaks of is kept as before"


def test_what_was_not_measured_changes_nothing() -> None:
    assert shares_after(None, SHARES, 0.95) == SHARES
    assert shares_after(a_version(1, asked(0, 0)), SHARES, 0.95) == SHARES
