"""Which texts measure obedience, of those that turned out to be usable."""

import pytest

from records.hints.texts import measuring_texts, split_wishes
from records.hints.types import HintPrompt, PromptKind


def a_text(prompt_id: str, *, held_out: bool = False, kind: PromptKind = PromptKind.OPPOSITE):
    return HintPrompt(
        prompt_id=prompt_id,
        hint_id="h",
        kind=kind,
        text=prompt_id,
        held_out=held_out,
        asked=8,
        followed=8,
        dropped=None,
    )


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([], set()),
        ([a_text("a")], set()),
        ([a_text("a", held_out=True)], set()),
        ([a_text("a"), a_text("b", held_out=True)], {"b"}),
        ([a_text("a"), a_text("b")], {"a"}),
        ([a_text("a", held_out=True), a_text("b", held_out=True)], {"a"}),
        ([a_text("a"), a_text("b", kind=PromptKind.OUTSIDE)], set()),
        ([a_text("a", held_out=True), a_text("b", kind=PromptKind.OUTSIDE)], set()),
        ([a_text("a", held_out=True), a_text("b", held_out=True), a_text("c")], {"a"}),
        ([*(a_text(one, held_out=one in "be") for one in "abcdef")], {"b", "e"}),
    ],
)
def test_one_text_trains_and_of_several_one_measures(texts, expected) -> None:
    assert measuring_texts(texts) == expected


def test_texts_that_name_what_they_decline_train_and_measure_alike() -> None:
    naming = ["No Python, please.", "Do not write a program in Python.", "No Python code."]
    others = ["Tell me in sentences.", "Explain it in words.", "Just say what to do."]
    split = dict(split_wishes("Write it as Python code.", [*others, *naming]))
    assert split.keys() == {*naming, *others}
    assert [split[text] for text in naming].count(True) == 1
    assert [split[text] for text in others].count(True) == 1
    assert split_wishes("Write it as Python code.", []) == []


@pytest.mark.parametrize(("count", "held"), [(1, 0), (2, 1), (5, 1), (8, 2), (12, 4)])
def test_no_more_are_held_out_than_may_measure(count: int, held: int) -> None:
    split = split_wishes("a hint", [f"wish {number}" for number in range(count)])
    assert [is_held for _, is_held in split].count(True) == held
