"""A text that detectors search, and the types that they share. It knows no kind of secret."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import TypeAlias

Span: TypeAlias = tuple[int, int]

_PIECE, _PIECE_OVERLAP = 65_536, 128
"""Patterns of short, plain things see this much, so that no call blocks the interpreter long."""
_LONG_RUN = re.compile(r"(?:[\w.~+/=:-]{0,19}+[^\w.~+/=:-]++)*+[\w.~+/=:-]{20}", re.ASCII)


class View:
    """A text to be searched, and what several detectors need to know about it."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def lowered(self) -> str:
        """The text in lower case, with every character at the same position."""
        # The only letter that lower() turns into two characters.
        return self.text.replace("\u0130", "I").lower()

    @cached_property
    def may_hold_token(self) -> bool:
        """Whether it has a run of letters and digits that is as long as a token."""
        starts = range(0, max(len(self.text), 1), _PIECE - _PIECE_OVERLAP)
        return any(_LONG_RUN.match(self.text, start, start + _PIECE) for start in starts)


Detector: TypeAlias = Callable[[View], Iterable[Span]]


def pieces(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    """The matches of a pattern that never reads more than the overlap."""
    for start in range(0, max(len(text) - _PIECE_OVERLAP, 1), _PIECE - _PIECE_OVERLAP):
        end = start + _PIECE
        for match in pattern.finditer(text, start, end):
            # What is cut off here is whole in the next piece.
            if match.end() < end or end >= len(text):
                yield match
