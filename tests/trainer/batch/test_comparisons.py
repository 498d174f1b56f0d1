"""Turns rewarded by what each added to the worth of its session."""

import pytest

from records.types import PastSession, SessionOutcome
from trainer.batch.comparisons import RewardFacts, process_advantages, utilities
from trainer.batch.reward_view import view_rewards
from trainer.objectives.options import HindsightOpd


def turn(
    session: str,
    number: int,
    outcome: float | None,
    *values: float | None,
    task: str = "task",
    past: tuple[PastSession, ...] = (),
) -> RewardFacts:
    """One of a session whose turns had these values; `number` past them is of another branch."""
    named = tuple((f"{session}{place}", value) for place, value in enumerate(values))
    return RewardFacts(
        reward=1.0,
        step_index=number,
        prompt_key=session,
        length=3,
        turn_id=f"{session}{number}",
        session_id=session,
        session=SessionOutcome(outcome=outcome, values=named, start=task, past=past),
    )


def test_worked_example():
    """Utilities 0.5 and -0.25 of a, 0.25 of b: mean 1/6, std 0.3819. Outcomes 1 and -1."""
    a = [turn("a", number, 1.0, 0.25, 0.75, 0.5) for number in range(3)]
    b = [turn("b", number, 0.0, 0.25, 0.5) for number in range(2)]
    u = [(0.5 - 1 / 6) / 0.381881, (-0.25 - 1 / 6) / 0.381881, (0.25 - 1 / 6) / 0.381881]
    o = 0.707107
    expected = [u[0] + u[1] + o, u[1] + o, o, u[2] - o, -o]
    assert process_advantages([*a, *b]) == pytest.approx(expected, abs=1e-4)
    assert utilities([*a, *b]) == [0.5, -0.25, 0.25]
    # Whatever their order in the batch.
    assert process_advantages([b[1], a[0]]) == pytest.approx([-o, expected[0]], abs=1e-4)


def test_without_values_the_outcome_alone_counts():
    found = process_advantages(
        [turn("a", 0, 1.0), turn("a", 1, 1.0), turn("b", 0, 0.0, 0.5), turn("c", 9, 0.0, 0.2, 0.9)]
    )
    one, third = 1.154701, -0.577350
    # The only utility stays as it is, and is no part of another branch's turn.
    assert found == pytest.approx([one, one, third, third], abs=1e-4)


def test_an_unknown_value_is_no_reward():
    a = [turn("a", number, 1.0, None, 0.75, 0.5) for number in range(3)]
    first, second, last = process_advantages(a)
    assert first == second == pytest.approx(1.0 - 0.25)
    assert last == pytest.approx(1.0)
    assert utilities(a) == [-0.25]


def test_an_outcome_that_nobody_said_is_not_guessed():
    assert process_advantages([]) == []
    with pytest.raises(ValueError, match="has no outcome"):
        process_advantages([turn("a", 0, None)])


def test_sessions_of_a_hard_task_are_not_compared_with_those_of_an_easy_one():
    easy = [turn("a", number, 1.0, 0.75, 1.0, task="easy") for number in range(2)]
    hard = [turn("b", number, 0.0, 0.0, 0.25, task="hard") for number in range(2)]
    # Each alone with its task, so outcomes of 1 and -1 and utilities of 0.25 stay as they are.
    assert process_advantages([*easy, *hard]) == pytest.approx([1.25, 1.0, -0.75, -1.0])


def test_earlier_sessions_at_a_task_count_in_its_statistics_alone():
    """The worked example, with b from the store."""
    b = PastSession(session_id="b", version=3, outcome=0.0, values=(("b0", 0.25), ("b1", 0.5)))
    a = [turn("a", number, 1.0, 0.25, 0.75, 0.5, past=(b,)) for number in range(3)]
    again = [turn("b", number, 0.0, 0.25, 0.5) for number in range(2)]
    alone, beside = process_advantages(a), process_advantages([*a, *again])
    assert alone == pytest.approx(beside[:3])
    assert alone == pytest.approx([0.489, -0.384, 0.707], abs=1e-3)
    assert len(alone) == 3


def test_the_share_of_turns_with_another_session_at_their_task_is_reported():
    options = HindsightOpd(reward_coef=1.0, reward_outcome="only", reward_baseline="process")
    b = PastSession(session_id="b", version=3, outcome=0.0)
    batch = [turn("a", 0, 1.0, past=(b,)), turn("c", 0, 1.0, task="another")]
    assert view_rewards(batch, options).metrics["reward/compared_frac"] == 0.5
