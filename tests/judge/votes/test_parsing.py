"""Decision and hint of a judge's answer, against the reference's vectors and beyond them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from judge.votes.parsing import parse_answer

GOLDEN = Path(__file__).parents[2] / "data" / "golden" / "openclaw_hint_judge.json"
CASES = json.loads(GOLDEN.read_text())["cases"]["parse"]


@pytest.mark.parametrize("case", CASES, ids=[str(i) for i in range(len(CASES))])
def test_reference_cases(case):
    assert parse_answer(case["text"]) == (case["score"], case["hint"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{-1} on reflection \boxed{1}", (1, "")),
        (r"\boxed{1} on reflection \boxed{0}", (None, "")),
        (r"\boxed{1} \boxed{10}", (1, "")),
        (r"\boxed{-2}", (None, "")),
        (r"\boxed{--1}", (None, "")),
        (r"\boxed{1.0}", (None, "")),
        (r"\Boxed{1}", (None, "")),
        ("[HINT_START]a[HINT_END][HINT_START][HINT_END]", (None, "")),
        ("[HINT_END]x[HINT_START]y[HINT_END]", (None, "y")),
        ("[hint_start]lower case[hint_end]", (None, "")),
        ("[HINT_START]one[HINT_END] [HINT_START]two", (None, "one")),
    ],
)
def test_edges(text, expected):
    assert parse_answer(text) == expected


@given(st.text(), st.sampled_from([1, -1]))
def test_the_last_decision_wins_whatever_stands_before(text, score):
    assert parse_answer(f"{text} \\boxed{{{score}}}")[0] == score


@given(st.text())
def test_any_text_parses(text):
    score, hint = parse_answer(text)
    assert score in (1, -1, None)
    assert hint == hint.strip()
