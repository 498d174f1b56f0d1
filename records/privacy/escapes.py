r"""Text with its JSON escapes undone, and where each character came from.

`"ann\u0040firm.de"` contains an address that no pattern sees, and after `\n` a word seems to begin
with an n. Works on any text, whole JSON or not.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator

_ESCAPE = re.compile(r'\\(?:u([0-9a-fA-F]{4})|(["\\/bfnrt]))')
_SHORT = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
MAX_LEVELS = 3
"""How often text within text is undone: arguments with JSON text that contains JSON text."""


class Readings:
    """Readings of a text, undone a number of times; `origin` maps a reading's span to the text
    itself.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._steps: list[tuple[list[int], list[int]]] = []

    def __iter__(self) -> Iterator[str]:
        """The text itself, then each reading of the one before it, as long as they differ."""
        text = self._text
        yield text
        while len(self._steps) < MAX_LEVELS and "\\" in text:
            undone, starts, origins = _undone(text)
            if len(starts) == 1:
                return
            self._steps.append((starts, origins))
            text = undone
            yield text

    def origin(self, start: int, end: int) -> tuple[int, int]:
        """Where a span of the newest reading is in the text."""
        for starts, origins in reversed(self._steps):
            start, end = _moved(start, starts, origins), _moved(end, starts, origins)
        return start, end


def _undone(text: str) -> tuple[str, list[int], list[int]]:
    """The text without escapes, and stretches: where each starts in it, and where in `text`."""
    parts: list[str] = []
    starts, origins = [0], [0]
    position = length = 0
    for match in _ESCAPE.finditer(text):
        parts.append(text[position : match.start()])
        length += match.start() - position
        code, short = match.groups()
        parts.append(chr(int(code, 16)) if code else _SHORT.get(short, short))
        starts += (length, length + 1)
        origins += (match.start(), match.end())
        position = match.end()
        length += 1
    parts.append(text[position:])
    return "".join(parts), starts, origins


def _moved(position: int, starts: list[int], origins: list[int]) -> int:
    stretch = bisect_right(starts, position) - 1
    return origins[stretch] + position - starts[stretch]
