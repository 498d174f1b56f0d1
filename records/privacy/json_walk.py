"""All texts of a JSON value as one, so that they are searched at once, and back.

Keys of objects, ids and long numbers are texts like any others. The well-formed base64 of a `data:`
URL is skipped; its head is searched.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from records.privacy.detectors import BREAK
from records.privacy.findings import Finding, without

_LEAST_NUMBER = 10**8
"""Smaller numbers are neither cards nor anything else that is looked for."""
_DATA_HEAD = re.compile(r"data:[a-z]{1,20}/[\w.+-]{1,80}(?:;charset=[\w-]{1,20})?;base64,")
_BASE64 = re.compile(r"[A-Za-z0-9+/]*")
_PIECE = 65_536
_LONGEST_PATH = 120


def num_looked_at(text: str) -> int:
    """How many characters of a text are searched: all, or the head of a well-formed data URL."""
    head = _DATA_HEAD.match(text)
    if head is None:
        return len(text)
    end = len(text)
    for _ in range(2):
        end -= text.endswith("=", 0, end)
    if (len(text) - head.end()) % 4 or end < head.end():
        return len(text)
    for start in range(head.end(), end, _PIECE):
        if _BASE64.fullmatch(text, start, min(start + _PIECE, end)) is None:
            return len(text)
    return head.end()


def num_chars(value: Any, limit: int) -> int:
    """Characters of all texts in a value; counting stops once `limit` is passed."""
    number = 0
    for text in _texts(value):
        number += num_looked_at(text)
        if number > limit:
            break
    return number


def is_short(value: Any, most: int) -> bool:
    """Whether a value has at most `most` characters and things in it; stops counting beyond."""
    left, waiting = most, [value]
    while waiting and left >= 0:
        item = waiting.pop()
        left -= 1
        if isinstance(item, str):
            left -= len(item)
        elif isinstance(item, dict | list | tuple):
            if len(item) > left:
                return False
            if isinstance(item, dict):
                left -= sum(len(str(key)) for key in item)
            waiting.extend(item.values() if isinstance(item, dict) else item)
    return left >= 0


def _texts(value: Any) -> Iterator[str]:
    """Every text of a value: strings, keys, and the digits of long numbers."""
    # Without recursion: values may nest as deep as JSON is read, and each text would pay for that.
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            for key, below in reversed(item.items()):
                waiting += (below, str(key))
        elif isinstance(item, list | tuple):
            waiting += reversed(item)
        elif (number := _digits(item)) is not None:
            yield number


def _digits(value: Any) -> str | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return repr(value) if is_number and abs(value) >= _LEAST_NUMBER else None


class Texts:
    """The texts of a value, joined by a separator that no finding extends across."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._texts = list(_texts(value))
        looked_at = [text[: num_looked_at(text)] for text in self._texts]
        self.joined = BREAK.join(looked_at)
        self._starts = [0, *accumulate(len(text) + len(BREAK) for text in looked_at)][:-1]

    def path_at(self, position: int) -> str:
        """Where the text at a position is in the value: `[3].function.description`."""
        wanted = bisect_right(self._starts, position) - 1
        for index, path in enumerate(_paths(self._value)):
            if index == wanted:
                return path
        return ""

    def without(self, findings: Sequence[Finding]) -> Any:
        """The value with marks in place of what was found."""
        by_text: dict[int, list[Finding]] = {}
        for finding in findings:
            index = bisect_right(self._starts, finding.start) - 1
            start = self._starts[index]
            end = min(finding.end - start, len(self._texts[index]))
            moved = replace(finding, start=finding.start - start, end=end)
            by_text.setdefault(index, []).append(moved)
        clean = (
            without(text, by_text[index]) if index in by_text else None
            for index, text in enumerate(self._texts)
        )
        return _rebuilt(self._value, clean)


def _rebuilt(value: Any, clean: Iterator[str | None]) -> Any:
    if isinstance(value, str):
        text = next(clean)
        return value if text is None else text
    if isinstance(value, dict):
        rebuilt: dict[str, Any] = {}
        numbers: dict[str, int] = {}
        for key, item in value.items():
            left = next(clean)
            name = left = key if left is None else left
            while name in rebuilt:  # several keys that redaction made equal
                numbers[left] = numbers.get(left, 1) + 1
                name = f"{left}_{numbers[left]}"
            rebuilt[name] = _rebuilt(item, clean)
        return rebuilt
    if isinstance(value, list | tuple):
        return [_rebuilt(item, clean) for item in value]
    if _digits(value) is not None:
        text = next(clean)
        return value if text is None else text
    return value


def _paths(value: Any) -> Iterator[str]:
    """Where each of `_texts` is; the place of a key is the object that has it, without the key."""
    waiting: list[tuple[Any, str]] = [(value, "")]
    while waiting:
        item, path = waiting.pop()
        if isinstance(item, dict):
            for key, below in reversed(item.items()):
                name = f"{path}.{key}" if _is_plain(str(key)) else f"{path}.(...)"
                waiting += ((below, name[:_LONGEST_PATH]), ("", f"{path}.(key)"))
        elif isinstance(item, list | tuple):
            named = [(below, f"{path}[{index}]") for index, below in enumerate(item)]
            waiting += reversed(named)
        elif isinstance(item, str) or _digits(item) is not None:
            yield path


def _is_plain(key: str) -> bool:
    """Whether a key may be shown: it is a name and too short to be a secret."""
    return len(key) <= 16 and key.replace("_", "").isalpha()
