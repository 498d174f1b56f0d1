"""Counter- and keep-lessons fill the hinted places while open wishes are done too seldom, and steps
are smaller.
"""

import pytest

from records.training.share import LessonShares
from rollout_bridge.rehearsal.recovery import deep_falls, rate_after, shares_after
from tests.opd.rehearsal.builders import a_version, asked

SHARES = LessonShares()


@pytest.mark.parametrize(("followed", "parts"), [(64, (9, 6)), (61, (9, 6)), (60, (12, 12))])
def test_a_step_after_a_fall_has_no_hinted_sample(followed: int, parts: tuple[int, int]) -> None:
    found = shares_after(a_version(1, asked(followed, 64)), SHARES, 0.95)
    assert found.of(24) == parts
    assert found.of(24, has_counter=False) == (0, 6), "without counter-lessons it trains as before"


def test_a_step_after_a_fall_has_counter_lessons_alone_if_nothing_else_can_be_kept() -> None:
    found = shares_after(a_version(1, asked(60, 64)), SHARES, 0.95)
    assert found.of(24, has_keep=False) == (24, 0)
    assert found.of(5) == (3, 2)


def test_the_start_has_lost_nothing() -> None:
    assert shares_after(a_version(0, asked(50, 64)), SHARES, 0.95) == SHARES


def test_what_was_not_measured_changes_nothing() -> None:
    assert shares_after(None, SHARES, 0.95) == SHARES
    assert shares_after(a_version(1, asked(0, 0)), SHARES, 0.95) == SHARES


def test_a_deep_fall_is_remembered_for_eight_versions() -> None:
    followed = [64, 58, 57, *[62] * 7]
    rows = [a_version(number, asked(one, 64)) for number, one in enumerate(followed, start=1)]
    found = [deep_falls(rows[: number + 1], 0.95) for number in range(len(rows))]
    assert found == [0, 0, 1, 1, 1, 1, 1, 1, 1, 1]
    assert deep_falls([*rows, a_version(11, asked(62, 64))], 0.95) == 0
    assert deep_falls([a_version(0, asked(50, 64))], 0.95) == 0, "the start has lost nothing"


def test_each_deep_fall_halves_the_rate_down_to_a_quarter() -> None:
    row = a_version(9, asked(62, 64))
    rows = [row.model_copy(update={"deep_falls": number}) for number in range(4)]
    assert [rate_after(one, 0.95) for one in rows] == [1.0, 0.5, 0.25, 0.25]
    assert rate_after(None, 0.95) == 1.0


def test_a_step_that_wins_open_wishes_back_is_a_whole_one() -> None:
    row = a_version(9, asked(50, 64)).model_copy(update={"deep_falls": 2})
    assert rate_after(row, 0.95) == 1.0
