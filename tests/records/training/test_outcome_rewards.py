"""An outcome as a reward: with what the judge says, without, and where nobody has said it."""

from __future__ import annotations

import pytest

from records.training.outcome_rewards import OutcomeReward, rewarded, step_reward
from records.types import PastAnswer, PromptHistory, SessionOutcome
from tests.records.training.test_teaching import a_sample


@pytest.mark.parametrize(
    ("outcome", "said", "kind", "expected"),
    [
        (1.0, 1 / 3, "add", 4 / 3),
        (0.0, 0.5, "add", -0.5),
        (0.75, None, "add", 0.5),
        (1.0, -1.0, "only", 1.0),
        (0.5, None, "only", 0.0),
        (None, 1.0, "add", None),
        (None, 1.0, "only", None),
    ],
)
def test_the_step_reward(
    outcome: float | None, said: float | None, kind: OutcomeReward, expected: float | None
) -> None:
    assert step_reward(outcome, said, kind) == (
        None if expected is None else pytest.approx(expected)
    )


def test_earlier_answers_without_an_outcome_are_no_comparison() -> None:
    answers = tuple(
        PastAnswer(turn_id=str(number), version=1, reward=0.5, length=3, outcome=outcome)
        for number, outcome in enumerate((1.0, None, 0.0))
    )
    sample = a_sample(
        reward=0.25,
        history=PromptHistory(recent=answers, first=answers[1:]),
        session=SessionOutcome(outcome=0.0),
    )
    found = rewarded(sample, "add")
    assert found.reward == -0.75
    assert [(one.turn_id, one.reward) for one in found.history.recent] == [("0", 1.5), ("2", -0.5)]
    assert [one.turn_id for one in found.history.first] == ["2"]
