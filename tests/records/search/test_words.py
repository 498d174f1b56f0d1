"""Text as words: what counts as one, what a search asks for, what is shown of a match."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from records.search.words import (
    MOST_ASKED,
    MOST_CHARACTERS,
    MOST_EXCERPTED,
    Excerpt,
    excerpt,
    phrases_of,
    words_of,
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("It's 70 F, in-flight.", "it s 70 f in flight"),
        ("STRASSE Straße", "strasse strasse"),
        ("get_weather(city='Köln')", "get weather city köln"),
        ("今天天气 ok", "今 天 天 气 ok"),
        ("<script>\x00\ud800</script>", "script script"),
        ("!?", ""),
    ],
)
def test_words_are_runs_of_letters_and_digits(text: str, words: str) -> None:
    assert words_of(text) == words


def test_a_search_asks_for_its_parts_and_for_what_is_quoted() -> None:
    assert phrases_of('Celsius "how warm" get_weather') == ("celsius", "how warm", "get weather")
    assert phrases_of('天气 "never closed') == ("天 气", "never closed")
    assert phrases_of("- * () NOT a OR a") == ("not", "a", "or")
    assert phrases_of("?!") == ()
    assert len(phrases_of(" ".join(map(str, range(100))))) == MOST_ASKED


def test_an_excerpt_shows_the_first_place_and_what_is_around() -> None:
    text = f"{'a ' * 100}I wanted Celsius, please. {'b ' * 100}"
    found = excerpt(text, ("missing", "wanted celsius"))
    assert found is not None
    assert found.found == "wanted Celsius"
    assert found.before.startswith("…")
    assert found.before.endswith("I ")
    assert found.after.startswith(", please")
    assert len(found.before) == len(found.after) == 61
    assert excerpt("I wanted it.", ("wanted it",)) == Excerpt(
        before="I ", found="wanted it", after="."
    )
    assert excerpt("nothing", ("here",)) is None
    repeated = excerpt("一二 a 一二三", ("一 二 三",))
    assert repeated == Excerpt(before="一二 a ", found="一二三", after="")


def test_an_excerpt_is_looked_for_at_the_beginning() -> None:
    assert excerpt("a" * (MOST_EXCERPTED - 2) + " b", ("b",)) is not None
    assert excerpt("a" * MOST_EXCERPTED + " b", ("b",)) is None


def test_only_the_beginning_of_a_long_text_is_read() -> None:
    assert words_of("a" * MOST_CHARACTERS + " end") == "a" * 200


@given(st.text())
def test_a_text_is_found_by_its_own_words(text: str) -> None:
    phrases = phrases_of(text.replace('"', " "))
    words = f" {words_of(text)} "
    assert all(f" {phrase} " in words for phrase in phrases)
    if phrases:
        assert excerpt(text, phrases) is not None
