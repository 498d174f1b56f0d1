"""Counter-lessons fill the hinted places while open wishes are done too seldom."""

import pytest

from records.training.share import LessonShares
from tests.opd.rehearsal.builders import a_version, asked
from trainer.rehearsal.recovery import shares_after

SHARES = LessonShares()


@pytest.mark.parametrize(("followed", "parts"), [(64, (9, 6)), (61, (9, 6)), (60, (18, 6))])
def test_a_step_after_a_fall_has_no_hinted_sample(followed: int, parts: tuple[int, int]) -> None:
    found = shares_after(a_version(1, asked(followed, 64)), SHARES, 0.95)
    assert found.of(24) == parts
    assert found.of(24, has_counter=False) == (0, 6), "without counter-lessons it trains as before"


def test_the_start_has_lost_nothing() -> None:
    assert shares_after(a_version(0, asked(50, 64)), SHARES, 0.95) == SHARES


def test_what_was_not_measured_changes_nothing() -> None:
    assert shares_after(None, SHARES, 0.95) == SHARES
    assert shares_after(a_version(1, asked(0, 0)), SHARES, 0.95) == SHARES
