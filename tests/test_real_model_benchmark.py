"""The benchmark on a pretrained model: its rules, and its judge on the product's own prompts."""

from __future__ import annotations

import random

import pytest

from benchmarks.real_model.__main__ import HEADER, of_the_way, row
from benchmarks.real_model.judge import RuleJudge
from benchmarks.real_model.wishes import (
    HELD_OUT,
    REQUESTS,
    TOPICS,
    WISHES,
    Kind,
    Wish,
    is_code,
    is_one_sentence,
    is_poem,
    kind_of,
    new_request,
    wish_in,
)
from examples.tool_lab.evaluate import Rate
from judge.hints import prompts
from judge.votes.parsing import last_decision, parse_answer
from judge.votes.prompts import judge_messages
from records.messages import Message

ALL = pytest.mark.parametrize("wish", WISHES.values(), ids=WISHES)
SHOWN = {
    "sentence": "It carries people over water.",
    "code": "Like this:\n\n```python\nboil(egg)\n```",
    "poem": "A bridge of light,\na summer's day,\nmy words take flight\nand find their way.",
}
NOT_SHOWN = "Thank you. It is good of you to ask.\nI have been well."


@pytest.mark.parametrize(
    ("answer", "is_whole", "expected"),
    [
        ("It carries people over water.", True, True),
        ("It carries people over water.", False, False),
        ("It carries people. It is long.", True, False),
        ("It carries people\n\nover water.", True, False),
        ("Version 1.2 is out!", True, True),
        ("no end", True, False),
    ],
)
def test_one_sentence_is_one(answer: str, is_whole: bool, expected: bool) -> None:
    assert is_one_sentence(answer, is_whole) is expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Sure:\n```python\nboil(egg)", True),
        ("import eggs", True),
        ("    def boil(egg):", True),
        ("Then print(egg)", False),
        ("Boil it.\nImport tea from China.", False),
        ("from a shop", False),
    ],
)
def test_code_is_fenced_or_begins_as_a_line_of_python(answer: str, expected: bool) -> None:
    assert is_code(answer, True) is expected


@pytest.mark.parametrize(
    ("answer", "is_whole", "expected"),
    [
        (SHOWN["poem"], True, True),
        (f"Dear aunt,\n\n{SHOWN['poem']}", True, True),
        (SHOWN["poem"], False, False),
        (f"{SHOWN['poem']}\nThe", False, True),
        ("Dear aunt,\nthank you for the bread.\nI liked it.\nYours", True, False),
        ("I like your bread.\n" * 3, True, False),
        ("word " * 13 + "\nA line of verse.\nA line of verse.\nA line of verse.", True, False),
        ("", True, False),
    ],
)
def test_a_poem_has_four_short_lines_together(answer: str, is_whole: bool, expected: bool) -> None:
    assert is_poem(answer, is_whole) is expected


@pytest.mark.parametrize("kind", REQUESTS)
def test_questions_are_known_by_their_kind_and_held_out_topics_stay_apart(kind: Kind) -> None:
    rng = random.Random(0)
    asked, measured = (
        {new_request(rng, kind, held_out=held_out) for _ in range(300)}
        for held_out in (False, True)
    )
    assert not asked & measured
    assert {kind_of(one) for one in asked | measured} == {kind}
    assert len(set(TOPICS[kind])) == len(TOPICS[kind]) > 2 * HELD_OUT


@ALL
def test_measured_words_are_those_of_nobody_else(wish: Wish) -> None:
    texts = [wish.hint, *wish.objections, *wish.opposites, *wish.open_opposites]
    assert len(set(texts)) == len(texts)
    for words in texts:
        asks = words == wish.hint or words in wish.objections
        assert wish_in(f"something before {words} and behind") == (wish, asks)


def a_conversation(wish: Wish) -> list[Message]:
    return [{"role": "user", "content": new_request(random.Random(0), wish.kind, held_out=False)}]


@ALL
def test_the_judge_votes_for_the_hint_at_an_objection_alone(wish: Wish) -> None:
    judge = RuleJudge()
    answer: Message = {"role": "assistant", "content": NOT_SHOWN}
    for words in wish.objections:
        said: list[Message] = [{"role": "user", "content": words}]
        vote = parse_answer(judge.answer(judge_messages(a_conversation(wish), [], answer, said)))
        assert vote == (1, wish.hint)
    thanks: list[Message] = [{"role": "user", "content": "Thank you."}]
    vote = parse_answer(judge.answer(judge_messages(a_conversation(wish), [], answer, thanks)))
    assert vote[0] == -1


@ALL
def test_the_judge_answers_questions_about_hints(wish: Wish) -> None:
    judge = RuleJudge()

    def decided(messages: list[dict[str, str]]) -> int | None:
        return last_decision(judge.answer(messages))

    others = [one for one in WISHES.values() if one is not wish]
    assert decided(prompts.relation_messages(wish.hint, wish.hint)) == 1
    assert decided(prompts.relation_messages(wish.hint, wish.opposites[0])) == -1
    assert decided(prompts.relation_messages(wish.hint, others[0].hint)) == 0
    assert decided(prompts.rule_messages(wish.hint, wish.objections[0])) == 1
    assert decided(prompts.rule_messages(wish.hint, others[0].objections[0])) == -1
    assert decided(prompts.applies_messages(a_conversation(wish), [], wish.hint)) == 1
    assert decided(prompts.applies_messages(a_conversation(others[0]), [], wish.hint)) == -1
    for words, shown, not_shown in ((wish.hint, 1, -1), (wish.opposites[0], -1, 1)):
        for text, expected in ((SHOWN[wish.name], shown), (NOT_SHOWN, not_shown)):
            response: Message = {"role": "assistant", "content": text}
            asked = prompts.followed_messages(a_conversation(wish), [], response, words)
            assert decided(asked) == expected
    _, opposite = parse_answer(judge.answer(prompts.opposite_messages(wish.hint, "")))
    assert opposite in wish.opposites
    _, outside = parse_answer(judge.answer(prompts.outside_messages(wish.hint, [])))
    assert outside in {one.hint for one in others}


def test_a_row_says_how_much_of_the_way_was_gone() -> None:
    result = {
        "wish": "sentence",
        "weights": "lora",
        "start": {"wished": [10, 100], "hinted": [90, 100], "opposite": [80, 100]},
        "end": {"wished": [50, 100], "opposite": [80, 100]},
        "waited": {"seconds": 600.0, "hints": {"resting": 1}},
        "store": {"version": 7},
        "perplexity": [10.0, 10.1],
    }
    shown = dict(zip(HEADER, row(result), strict=True))
    assert shown["of the way"] == "50% [37, 63]"
    assert shown["of before"] == "1.000"
    assert shown["hints"] == "1 resting"


def test_few_answers_say_little_about_the_share_of_the_way() -> None:
    few, many = (
        [Rate(hits=share * n // 100, count=n) for share in (10, 30, 40)] for n in (50, 5_000)
    )
    assert of_the_way(*many) == "67% [61, 72]"
    low, high = of_the_way(*few).split("[")[1].rstrip("]").split(", ")
    assert float(low) < 30
    assert float(high) > 120
    assert of_the_way(few[1], few[2], few[1]) == "none to go"
