"""Which hint a turn gets, against the reference's vectors and beyond them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from judge.votes.selection import SELECTIONS, longest, longest_first, select_hints, shortest_first
from records.types import Vote

GOLDEN = Path(__file__).parents[2] / "data" / "golden" / "openclaw_hint_judge.json"
CASES = json.loads(GOLDEN.read_text())["cases"]["select"]


def vote(score: int | None, hint: str, index: int = 0) -> Vote:
    return Vote(
        index=index,
        score=score,
        hint=hint,
        text="",
        latency_s=0.0,
        prompt_tokens=None,
        completion_tokens=None,
    )


@pytest.mark.parametrize("case", CASES, ids=[str(i) for i in range(len(CASES))])
def test_reference_cases(case):
    votes = [vote(v["score"], v["hint"] or "", i) for i, v in enumerate(case["votes"])]
    expected = case["selected"]
    assert [(v.score, v.hint) for v in longest(votes)] == (
        [] if expected is None else [(expected["score"], expected["hint"])]
    )
    assert select_hints(votes, "longest")[:1] == ((expected["hint"].strip(),) if expected else ())


def test_ten_characters_fail_and_eleven_pass_counted_as_characters():
    assert select_hints([vote(1, "x" * 10)], "longest") == ()
    assert select_hints([vote(1, "x" * 11)], "longest")[0] == "x" * 11
    assert select_hints([vote(1, "提" * 10)], "longest") == ()
    assert select_hints([vote(1, "提" * 11)], "longest")[0] == "提" * 11


def test_the_length_that_counts_is_the_stripped_one():
    votes = [vote(1, "   short hint....   " + " " * 50), vote(1, "a longer hint than that")]
    assert select_hints(votes, "longest")[0] == "a longer hint than that"


def test_of_equally_long_hints_the_first_is_taken():
    assert select_hints([vote(1, "a" * 12), vote(1, "b" * 12)], "longest")[0] == "a" * 12


def test_shortest_first_keeps_three_different_ones():
    votes = [
        vote(1, hint) for hint in ["c" * 30, " " + "c" * 30, "a" * 12, "b" * 20, "d" * 40, "a" * 10]
    ]
    assert [v.hint for v in shortest_first(votes)] == ["a" * 12, "b" * 20, "c" * 30]
    assert select_hints(votes, "shortest_first")[0] == "a" * 12


def test_longest_first_begins_with_what_longest_takes():
    votes = [vote(1, hint) for hint in ["b" * 20, "a" * 12, " " + "c" * 30, "b" * 20, "d" * 30]]
    assert [v.hint.strip() for v in longest_first(votes)] == ["c" * 30, "d" * 30, "b" * 20]
    assert select_hints(votes, "longest_first")[0] == select_hints(votes, "longest")[0]


def test_a_minimum_of_positive_votes_counts_those_without_a_hint_too():
    votes = [vote(1, "a useful hint"), vote(1, ""), vote(-1, "")]
    assert select_hints(votes, "longest", min_positive_votes=2) == ("a useful hint",)
    assert select_hints(votes, "longest", min_positive_votes=3) == ()


def test_an_unknown_strategy_is_named_with_the_known_ones():
    known = "known: longest, longest_first, shortest_first"
    with pytest.raises(ValueError, match=f"unknown hint selection 'best'; {known}"):
        select_hints([], "best")


@given(
    st.lists(st.tuples(st.sampled_from([1, -1, None]), st.text(max_size=30)), max_size=8),
    st.sampled_from(sorted(SELECTIONS)),
)
def test_only_positive_votes_with_usable_hints_are_ever_chosen(pairs, strategy):
    votes = [vote(score, hint, i) for i, (score, hint) in enumerate(pairs)]
    usable = {hint.strip() for score, hint in pairs if score == 1 and len(hint.strip()) > 10}
    chosen = select_hints(votes, strategy)
    assert (chosen[0] in usable) if usable else (chosen == ())
