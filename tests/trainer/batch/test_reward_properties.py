"""What holds for the advantages of any batch's rewards: sums, orders and who may teach."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from records.types import PastAnswer, PastSession, PromptHistory, SessionOutcome
from trainer.batch.comparisons import RewardFacts
from trainer.batch.reward_view import view_rewards
from trainer.objectives.options import HindsightOpd

FEW = settings(max_examples=60)
OUTCOMES = st.sampled_from([0.0, 0.25, 0.5, 1.0])
REWARDS = st.sampled_from([-1.0, -0.5, 0.0, 0.5, 1.0])
Session = tuple[str, float, list[float | None]]
"""The prompt that it began with, its outcome, and the value of each of its turns."""
SESSIONS = st.lists(
    st.tuples(
        st.sampled_from("ab"),
        OUTCOMES,
        st.lists(st.none() | st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), min_size=1, max_size=4),
    ),
    min_size=1,
    max_size=5,
)


def options(**values: Any) -> HindsightOpd:
    return HindsightOpd.model_validate({"reward_coef": 1.0, **values})


def by_session(sessions: Sequence[Session], **values: Any) -> list[list[float]]:
    """The advantages of all turns of each session."""
    facts = [
        RewardFacts(
            reward=2.0 * outcome - 1.0,
            step_index=index,
            prompt_key=(place, index),
            length=1,
            turn_id=f"{place}-{index}",
            session_id=str(place),
            session=SessionOutcome(
                outcome=outcome,
                start=start,
                values=tuple((f"{place}-{i}", value) for i, value in enumerate(worth)),
            ),
        )
        for place, (start, outcome, worth) in enumerate(sessions)
        for index in range(len(worth))
    ]
    found = iter(view_rewards(facts, options(reward_outcome="only", **values)).advantages)
    return [[next(found) for _ in worth] for _, _, worth in sessions]


def utilities(worth: Sequence[float | None]) -> list[float]:
    """0 where a value is unknown, and at the last turn."""
    pairs = itertools.pairwise(worth)
    return [0.0 if a is None or b is None else b - a for a, b in pairs] + [0.0]


@FEW
@given(sessions=SESSIONS, divide=st.booleans())
def test_what_some_sessions_of_a_task_gain_the_others_lose(
    sessions: list[Session], divide: bool
) -> None:
    found = by_session(sessions, reward_baseline="session", divide_by_std=divide)
    for start in "ab":
        group = [
            (outcome, own)
            for (first, outcome, _), own in zip(sessions, found, strict=True)
            if first == start
        ]
        for _, own in group:
            assert len(set(own)) == 1
        assert sum(own[0] for _, own in group) == pytest.approx(0.0, abs=1e-9)
        for outcome, own in group:
            for other, others in group:
                assert outcome <= other or own[0] > others[0]


@FEW
@given(sessions=SESSIONS, past=st.lists(OUTCOMES, max_size=3))
def test_a_session_counts_once_whether_it_is_in_the_batch_or_earlier(
    sessions: list[Session], past: list[float]
) -> None:
    """Its own earlier record changes nothing, and neither does how many turns it has."""
    everything = [*sessions, *(("a", outcome, [None]) for outcome in past)]
    expected = by_session(everything, reward_baseline="session")
    facts = [
        RewardFacts(
            reward=1.0,
            step_index=0,
            prompt_key=place,
            length=1,
            session_id=str(place),
            session=SessionOutcome(
                outcome=outcome,
                start=start,
                past=tuple(
                    PastSession(session_id=str(other), version=0, outcome=one)
                    for other, (first, one, _) in enumerate(everything)
                    if first == start
                ),
            ),
        )
        for place, (start, outcome, _) in enumerate(sessions)
    ]
    found = view_rewards(
        facts, options(reward_outcome="only", reward_baseline="session")
    ).advantages
    assert found == pytest.approx([own[0] for own in expected[: len(sessions)]])


@FEW
@given(sessions=SESSIONS)
def test_process_advantages_keep_the_order_of_utilities_and_outcomes(
    sessions: list[Session],
) -> None:
    """A last turn has its session's part of the outcomes, which sum to 0 where there are several;
    the fall from each turn to the next is what the turn added, and these parts sum to 0 as well.
    """
    found = by_session(sessions, reward_baseline="process")
    for start in "ab":
        rows = [
            (outcome, utilities(worth), own)
            for (first, outcome, worth), own in zip(sessions, found, strict=True)
            if first == start
        ]
        if len(rows) == 1:
            assert rows[0][2][-1] == pytest.approx(2.0 * rows[0][0] - 1.0)
        else:
            assert sum(own[-1] for _, _, own in rows) == pytest.approx(0.0, abs=1e-9)
        added = [
            (utility, here - after)
            for _, parts, own in rows
            for utility, here, after in zip(parts, own, [*own[1:], own[-1]], strict=True)
        ]
        known = [(utility, part) for utility, part in added if utility != 0]
        assert all(part == pytest.approx(0.0, abs=1e-9) for u, part in added if u == 0)
        if len(known) == 1:
            assert known[0][1] == pytest.approx(known[0][0])
        elif known:
            assert sum(part for _, part in known) == pytest.approx(0.0, abs=1e-9)
        for utility, part in known:
            assert all(utility <= other or part > theirs for other, theirs in known)


@FEW
@given(outcome=OUTCOMES, first=st.floats(0, 1), second=st.floats(0, 1))
def test_a_session_alone_keeps_its_outcome_and_what_its_turn_added(
    outcome: float, first: float, second: float
) -> None:
    ((one, two),) = by_session([("a", outcome, [first, second])], reward_baseline="process")
    assert two == pytest.approx(2.0 * outcome - 1.0)
    assert one == pytest.approx(two + second - first)


Answer = tuple[str, float, int, float]
"""Prompt, reward, length and the nats by which the policy likes it more than the start does."""
ANSWERS = st.lists(
    st.tuples(st.sampled_from("ab"), REWARDS, st.integers(1, 50), st.floats(-3, 3)),
    min_size=1,
    max_size=6,
)


def turns(answers: Sequence[Answer], past: Sequence[PastAnswer] = ()) -> list[RewardFacts]:
    return [
        RewardFacts(
            reward=reward,
            step_index=0,
            prompt_key=prompt,
            length=length,
            turn_id=str(place),
            start_kl=nats,
            history=PromptHistory(recent=tuple(past)),
        )
        for place, (prompt, reward, length, nats) in enumerate(answers)
    ]


@FEW
@given(
    answers=ANSWERS,
    more=st.floats(0.5, 3),
    coef=st.sampled_from([0.01, 0.5]),
    baseline=st.sampled_from(["none", "prompt", "step"]),
)
def test_who_moves_further_from_the_start_gains_less(
    answers: list[Answer], more: float, coef: float, baseline: str
) -> None:
    """The first answer loses, and with a baseline that only subtracts, its rivals win what it
    loses.
    """
    (prompt, reward, length, nats), *others = answers
    chosen: dict[str, Any] = {"reward_baseline": baseline}
    if baseline != "none":
        chosen["divide_by_std"] = False
    charged = options(reward_kl_coef=coef, **chosen)
    before = view_rewards(turns(answers), charged).advantages
    after = view_rewards(
        turns([(prompt, reward, length, nats + more), *others]), charged
    ).advantages
    rivals = sum(baseline == "step" or one[0] == prompt for one in others)
    if baseline != "none" and rivals == 0:
        assert after == pytest.approx(before)
        return
    lost = coef * more if baseline == "none" else coef * more * rivals / (rivals + 1)
    assert after[0] == pytest.approx(before[0] - lost)
    for place, one in enumerate(others, start=1):
        is_rival = baseline == "step" or (baseline == "prompt" and one[0] == prompt)
        won = lost / rivals if is_rival else 0.0
        assert after[place] == pytest.approx(before[place] + won)


@FEW
@given(
    answers=ANSWERS,
    penalty=st.sampled_from(["uniform", "group", "anchor"]),
    warmup=st.integers(1, 10),
    step=st.integers(0, 12),
    least=st.none() | st.sampled_from([0.25, 0.5, 1.0]),
)
def test_a_penalty_that_warms_up_lies_between_none_and_all(
    answers: list[Answer], penalty: str, warmup: int, step: int, least: float | None
) -> None:
    chosen: dict[str, Any] = {"length_penalty": penalty, "length_coef": 0.2}
    if penalty == "anchor":
        chosen["length_anchor"] = 10
    facts = turns(answers)
    spared = options(length_min_pass_rate=least, length_warmup_steps=warmup, **chosen)
    found = view_rewards(facts, spared, step).advantages
    whole = view_rewards(facts, options(**chosen)).advantages
    share = min(1.0, step / warmup)
    for (prompt, reward, _, _), ours, full in zip(answers, found, whole, strict=True):
        passed = [one[1] > 0 for one in answers if one[0] == prompt]
        is_hard = least is not None and sum(passed) / len(passed) < least
        assert ours == pytest.approx(reward if is_hard else reward + share * (full - reward))
        # Only the group penalty pays for being short, and never a wrong answer.
        assert ours <= reward or (penalty == "group" and reward > 0)


@FEW
@given(answers=ANSWERS, one=st.floats(0, 1), other=st.floats(0, 1), mix=st.booleans())
def test_a_higher_threshold_takes_the_teacher_from_no_turn(
    answers: list[Answer], one: float, other: float, mix: bool
) -> None:
    def teaches(threshold: float) -> list[bool]:
        chosen = options(mix="replace" if mix else "sum", pass_rate_threshold=threshold)
        return view_rewards(turns(answers), chosen).eligible

    few, many = teaches(min(one, other)), teaches(max(one, other))
    assert all(more or not less for less, more in zip(few, many, strict=True))
    assert not any(
        less and reward > 0 for less, (_, reward, _, _) in zip(many, answers, strict=True)
    )
    # Every prompt passes at most always, so every failure may be taught.
    assert teaches(1.0) == [reward <= 0 for _, reward, _, _ in answers]


@FEW
@given(answers=ANSWERS, past=st.lists(REWARDS, max_size=4))
def test_earlier_answers_that_pass_take_the_teacher_and_those_that_fail_bring_it(
    answers: list[Answer], past: list[float]
) -> None:
    chosen = options(pass_rate_threshold=0.5)
    earlier = [
        PastAnswer(turn_id=f"past {place}", version=0, reward=reward, length=1)
        for place, reward in enumerate(past)
    ]
    alone, beside = turns(answers), turns(answers, earlier)
    before, after = view_rewards(alone, chosen).eligible, view_rewards(beside, chosen).eligible
    if all(reward > 0 for reward in past):
        assert all(less or not more for less, more in zip(before, after, strict=True))
    if all(reward <= 0 for reward in past):
        assert all(more or not less for less, more in zip(before, after, strict=True))
    assert not any(math.isnan(value) for value in view_rewards(beside, chosen).advantages)
