"""Open wishes, hint by hint, over the versions of a journal."""

from __future__ import annotations

from collections import Counter

from tests.trainer.rehearsal.builders import a_prompt, a_state, a_version, asked
from trainer.rehearsal.config import RehearsalConfig
from trainer.rehearsal.measuring import Wish, wishes_in_turn
from trainer.rehearsal.review import obedience_of

CONFIG = RehearsalConfig()


def test_enough_answers_of_one_version_speak_for_it_alone() -> None:
    rows = [a_version(1, of_hints={"h0": asked(0, 32), "h1": asked(32, 32)})]
    found = obedience_of("h0", rows, asked(30, 32), CONFIG)
    assert found is not None
    assert (found.rate.hits, found.rate.count) == (30, 32)


def test_few_answers_are_taken_together_with_those_before() -> None:
    parts = [{"h0": asked(6, 6)}, {"h1": asked(6, 6)}, {"h0": asked(3, 6)}]
    rows = [a_version(number, of_hints=one) for number, one in enumerate(parts)]
    found = obedience_of("h0", rows, asked(4, 6), CONFIG)
    assert found is not None
    assert (found.rate.hits, found.rate.count) == (13, 18)
    assert found.rate.value < found.floor


def test_too_few_answers_say_nothing() -> None:
    rows = [a_version(1, of_hints={"h0": asked(1, 2), "h1": asked(1, 20)})]
    assert obedience_of("h0", rows, None, CONFIG) is None
    assert obedience_of("h2", rows, None, CONFIG) is None


def test_answers_of_long_ago_say_nothing_of_now() -> None:
    rows = [a_version(number, of_hints={"h0": asked(1, 2)}) for number in range(20)]
    found = obedience_of("h0", rows, asked(2, 2), CONFIG)
    assert found is not None
    assert (found.rate.hits, found.rate.count) == (9, 16)
    empty = [a_version(number) for number in range(20)]
    assert obedience_of("h0", [*rows, *empty], asked(2, 2), CONFIG) is None


def test_every_hint_is_asked_about_as_often_and_every_wish_in_its_turn() -> None:
    turn = a_state("t0", "What is it like in Rome?")
    hints = [
        [Wish(hint_id="h0", turn=turn, prompt=a_prompt(f"p{number}")) for number in range(5)],
        [],
        [Wish(hint_id="h1", turn=turn, prompt=a_prompt("q0"))],
    ]
    asked_for = [one for version in range(5) for one in wishes_in_turn(hints, 4, version)]
    assert Counter(one.hint_id for one in asked_for[:4]) == {"h0": 2, "h1": 2}
    of_first = [one.prompt.prompt_id for one in asked_for if one.hint_id == "h0"]
    assert of_first == [f"p{number % 5}" for number in range(10)]
    assert wishes_in_turn([[]], 4, 0) == []
