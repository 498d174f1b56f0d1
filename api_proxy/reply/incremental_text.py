"""Turns ids into text as they come, as far as it is certain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import StringIO

REPLACEMENT = "\ufffd"
_MOST_BYTES = 4
"""Of a character in UTF-8. A token has at least one."""
_LONGEST_WAIT = 8
"""How many pushes a character takes at most: what is none after these never becomes one."""


class IncrementalText:
    """Decodes ids as they come; `text` is all that is certain so far."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._num_read = 0
        self._num_waits = 0
        self._text = StringIO()

    @property
    def text(self) -> str:
        """All that is certain so far."""
        return self._text.getvalue()

    def push(self, ids: Sequence[int]) -> str:
        """Add ids; returns what is now certain. The last ids wait for the next ones if they end in
        the middle of a character, but not forever: bytes that never become a character would be
        decoded again with each id.

        A token's text may depend on the one before it, so the window keeps the last tokens that
        were read, and what it gains is new.
        """
        self._window.extend(ids)
        known = self._decode(self._window[: self._num_read])
        length = len(self._window)
        for end in range(length, max(self._num_read, length - _MOST_BYTES), -1):
            whole = self._decode(self._window[:end])
            if len(whole) > len(known) and not whole.endswith(REPLACEMENT):
                return self._read(whole[len(known) :], end)
        self._num_waits += 1
        if self._num_waits < _LONGEST_WAIT:
            return ""
        return self._read(self._decode(self._window)[len(known) :], length)

    def _read(self, new: str, end: int) -> str:
        """Note `new` as the text of the window's ids before `end`."""
        self._window, self._num_read = self._window[self._num_read :], end - self._num_read
        self._num_waits = 0
        self._text.write(new)
        return new
