"""Text as words, the same for both databases: what is stored of it, what is asked, what is shown.

A word is a run of letters and digits, without regard to case. Chinese, Japanese and Korean are
written without spaces: there, each character is a word, and several of them are a phrase.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_CHARACTER = "\u2e80-\u2fdf\u3005-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
_WORD = re.compile(rf"[{_CHARACTER}]|[^\W_{_CHARACTER}]+")
_PART = re.compile(r'"([^"]*)"?|(\S+)')
MOST_CHARACTERS = 100_000
"""Characters of a turn that are searched: its beginning. PostgreSQL refuses a tsvector of 1 MB."""
MOST_EXCERPTED = 20_000
"""Characters of a turn in which an excerpt is looked for: a page shows many."""
MOST_ASKED = 16
"""Phrases of one search."""
LONGEST_WORD = 200
"""Characters of a word that are indexed: its beginning."""
_AROUND = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """Where a text contains what was searched for: the words found, and what stands around them."""

    before: str
    found: str
    after: str


def words_of(text: str) -> str:
    """The words of a text, joined by spaces."""
    return " ".join(word for word, _ in _words(text[:MOST_CHARACTERS]))


def phrases_of(query: str) -> tuple[str, ...]:
    """The phrases that a text must contain, each as `words_of` gives it: what stands in quotes, and
    each other part between spaces. Parts without a word are left out.
    """
    parts = (quoted or plain for quoted, plain in _PART.findall(query))
    phrases = dict.fromkeys(filter(None, map(words_of, parts)))
    return tuple(phrases)[:MOST_ASKED]


def excerpt(text: str, phrases: Sequence[str]) -> Excerpt | None:
    """Where the beginning of a text has the first phrase that it has; None: it has none."""
    places = list(_words(text[:MOST_EXCERPTED]))
    joined = f" {' '.join(word for word, _ in places)} "
    for phrase in phrases:
        at = joined.find(f" {phrase} ")
        if at >= 0:
            first = joined.count(" ", 0, at)
            start = places[first][1].start()
            end = places[first + phrase.count(" ")][1].end()
            return Excerpt(
                before=_cut(text[:start], start > _AROUND, at_start=True),
                found=text[start:end],
                after=_cut(text[end:], len(text) - end > _AROUND, at_start=False),
            )
    return None


def _cut(text: str, is_long: bool, *, at_start: bool) -> str:
    if not is_long:
        return text
    return f"…{text[-_AROUND:]}" if at_start else f"{text[:_AROUND]}…"


def _words(text: str) -> Iterator[tuple[str, re.Match[str]]]:
    """Words of a text, each with its place; cut to what a database's index can hold."""
    for found in _WORD.finditer(text):
        yield found[0].casefold()[:LONGEST_WORD], found
