"""What a turn's votes come to: hints, reward, or the end of the turn."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from judge.config import JudgeConfig, RewardKind
from judge.votes.decision import decide, reward_of
from records.names import DropReason
from records.types import Verdict, Vote

SHORT, LONG = "a useful hint", "a longer and useful hint"


def vote(score: int | None, hint: str = "", text: str = "", index: int = 0) -> Vote:
    return Vote(
        index=index,
        score=score,
        hint=hint,
        text=text,
        latency_s=0.0,
        prompt_tokens=None,
        completion_tokens=None,
    )


def decided(votes: list[Vote], **options: Any) -> tuple[Verdict, DropReason | None]:
    drop = options.pop("drop", None)
    config = JudgeConfig(base_url="http://j/v1", model="j", **options)
    return decide("t", votes, config, num_omitted=2, drop=drop)


def test_without_rewards_the_longest_hint_decides_alone() -> None:
    verdict, drop = decided([vote(1, SHORT), vote(1, LONG), vote(-1)])
    assert (verdict.hint, verdict.candidates, verdict.reward, drop) == (LONG, (LONG,), None, None)
    assert (verdict.selection, verdict.judge, verdict.num_omitted) == ("longest", "j", 2)
    verdict, drop = decided([vote(-1), vote(-1)])
    assert (verdict.hint, verdict.reward, drop) == (None, None, DropReason.NO_HINT)


def test_shortest_first_keeps_several() -> None:
    votes = [vote(1, LONG), vote(1, SHORT), vote(1, f" {SHORT} "), vote(1, LONG + "!")]
    verdict, _ = decided(votes, selection="shortest_first")
    assert verdict.candidates == (SHORT, LONG, LONG + "!")
    verdict, _ = decided(votes, selection="shortest_first", max_candidates=2)
    assert (verdict.hint, verdict.candidates) == (SHORT, (SHORT, LONG))


@pytest.mark.parametrize(
    ("scores", "majority", "mean"),
    [
        ([1, 1, -1], 1.0, 1 / 3),
        ([-1, -1, None], -1.0, -1.0),
        ([1, -1], 0.0, 0.0),
        ([None, 1, None], 1.0, 1.0),
        ([None, None], None, None),
        ([], None, None),
    ],
)
def test_rewards_are_the_majority_or_the_mean_of_the_valid_votes(
    scores: list, majority: float | None, mean: float | None
) -> None:
    votes = [vote(score) for score in scores]
    assert reward_of(votes, "verdict") == majority
    assert reward_of(votes, "votes") == (None if mean is None else pytest.approx(mean))
    assert reward_of(votes, "none") is None


def test_a_vote_of_zero_has_no_say_on_the_hint_and_one_on_the_reward() -> None:
    votes = [vote(None, text="\\boxed{0}"), vote(None, text="\\boxed{0}"), vote(1, SHORT)]
    assert (reward_of(votes, "verdict"), reward_of(votes, "votes")) == (0.0, pytest.approx(1 / 3))


@pytest.mark.parametrize("kind", ["verdict", "votes"])
def test_with_a_reward_a_turn_needs_no_hint(kind: str) -> None:
    verdict, drop = decided([vote(-1), vote(-1, LONG), vote(None)], reward=kind)
    assert (verdict.hint, verdict.candidates, verdict.reward, drop) == (None, (), -1.0, None)
    verdict, drop = decided([vote(1, LONG), vote(1)], reward=kind)
    assert (verdict.hint, verdict.reward, drop) == (LONG, 1.0, None)
    verdict, drop = decided([vote(None), vote(None)], reward=kind)
    assert (verdict.reward, drop) == (None, DropReason.NO_HINT)


def test_what_is_dropped_already_has_neither() -> None:
    verdict, drop = decided(
        [vote(1, LONG)], reward="verdict", drop=DropReason.JUDGE_PROMPT_TOO_LONG
    )
    assert (verdict.hint, verdict.reward) == (None, None)
    assert drop is DropReason.JUDGE_PROMPT_TOO_LONG
    assert len(verdict.votes) == 1


@given(
    st.lists(st.tuples(st.sampled_from([1, -1, None]), st.text(max_size=20)), max_size=6),
    st.sampled_from(["longest", "shortest_first"]),
    st.sampled_from(["none", "verdict", "votes"]),
    st.integers(1, 4),
)
def test_a_turn_is_dropped_exactly_if_it_has_neither_hint_nor_reward(
    pairs: list, selection: str, kind: str, max_candidates: int
) -> None:
    votes = [vote(score, hint, index=i) for i, (score, hint) in enumerate(pairs)]
    verdict, drop = decided(votes, selection=selection, reward=kind, max_candidates=max_candidates)
    assert (drop is None) == (verdict.hint is not None or verdict.reward is not None)
    assert len(verdict.candidates) <= max_candidates
    assert verdict.reward is None or -1 <= verdict.reward <= 1


@pytest.mark.parametrize(
    ("kind", "said", "expected"),
    [
        ("none", -1.0, None),
        ("verdict", -0.5, -1.0),
        ("verdict", 0.0, 0.0),
        ("votes", -0.5, -0.5),
        ("votes", None, 1.0),
    ],
)
def test_what_a_person_said_takes_the_place_of_the_votes_reward(
    kind: RewardKind, said: float | None, expected: float | None
) -> None:
    votes = [vote(1, SHORT), vote(None, text="?")]
    assert reward_of(votes, kind, said) == expected
    config = JudgeConfig(base_url="http://j/v1", model="j", reward=kind)
    verdict, drop = decide("t", votes, config, num_omitted=0, said=said)
    assert (verdict.reward, verdict.hint, drop) == (expected, SHORT, None)


def test_a_turn_that_its_session_will_reward_is_dropped_for_nothing_that_the_votes_say() -> None:
    config = JudgeConfig(base_url="http://j/v1", model="j", reward="outcome")
    for votes in ([vote(-1)], [vote(None, text="?")], []):
        verdict, drop = decide("t", votes, config, num_omitted=0, said=-1.0)
        assert (verdict.reward, verdict.hint, verdict.awaits_outcome, drop) == (
            None,
            None,
            True,
            None,
        )
    verdict, drop = decide("t", [vote(1, SHORT)], config, num_omitted=0)
    assert (verdict.hint, verdict.reward, drop) == (SHORT, None, None)
    for reason in (DropReason.JUDGE_UNAVAILABLE, DropReason.NO_RECORDED_VOTES):
        given_up, drop = decide("t", [], config, num_omitted=0, drop=reason)
        assert (given_up.awaits_outcome, drop) == (True, None)
