"""Settings that cannot work are refused when they are read."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from judge.config import JudgeConfig
from judge.votes.selection import SELECTIONS

REQUIRED = {"base_url": "http://127.0.0.1:1/v1", "model": "judge"}


def test_the_defaults_are_the_published_ones():
    config = JudgeConfig.model_validate(REQUIRED)
    assert (config.votes, config.temperature, config.top_p) == (3, 0.6, 1.0)
    assert (config.selection, config.min_positive_votes) == ("longest", 1)
    assert (config.reward, config.max_candidates) == ("none", 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_url": "localhost:8000/v1"}, "should match pattern"),
        ({"votes": 0}, "greater than or equal to 1"),
        ({"vote": 3}, "Extra inputs are not permitted"),
        ({"selection": "best"}, "choose one of longest, longest_first, shortest_first"),
        ({"votes": 2, "min_positive_votes": 3}, "can never be reached with 2 votes"),
        ({"temperature": "warm"}, "valid number"),
        ({"reward": "mean"}, "'none', 'verdict', 'votes' or 'outcome'"),
        ({"max_candidates": 0}, "greater than or equal to 1"),
        ({"timeout_s": 0}, "greater than 0"),
        ({"loop": {"concurrency": 0}}, "greater than or equal to 1"),
    ],
)
def test_what_cannot_work_is_refused(change, message):
    with pytest.raises(ValidationError, match=message):
        JudgeConfig.model_validate(REQUIRED | change)


@pytest.mark.parametrize("selection", sorted(SELECTIONS))
def test_every_registered_selection_can_be_chosen(selection):
    assert JudgeConfig.model_validate(REQUIRED | {"selection": selection}).selection == selection


def test_the_key_is_not_shown():
    config = JudgeConfig.model_validate(REQUIRED | {"api_key": "sk-secret"})
    assert "sk-secret" not in repr(config)
    assert "sk-secret" not in config.model_dump_json()
