"""Votes on a turn as a reward, beyond the reference's vectors."""

import pytest

from judge.votes.rewards import majority_reward, parse_reward


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{0}", 0),
        (r"\boxed{-1} then \boxed{+1}", 1),
        (r"\boxed{1} then \boxed{2}", None),
        (r"\boxed{ 1 }", None),
        ("", None),
    ],
)
def test_the_last_box_decides_and_zero_is_a_vote(text, expected):
    assert parse_reward(text) == expected


@pytest.mark.parametrize(
    ("votes", "expected"),
    [
        ([1, 1, -1], 1.0),
        ([1, -1], 0.0),
        ([0, 0, 1], 0.0),
        ([None, None, -1], -1.0),
        ([1, 1, -1, -1, 0], 0.0),
        ([], 0.0),
        ([2, 2, 1], 1.0),
    ],
)
def test_a_tie_or_no_vote_is_neutral(votes, expected):
    assert majority_reward(votes) == expected
