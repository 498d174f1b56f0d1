"""Turns ids into text as they come, as far as it is certain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import StringIO

REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 8
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
        """Add ids; returns what is now certain. Text that ends in the middle of a character waits
        for the next ids, but not forever: bytes that never become a character would be decoded
        again with each id.

        A token's text may depend on the one before it, so the window keeps the last tokens that
        were read, and what it gains is new.
        """
        self._window.extend(ids)
        known = self._decode(self._window[: self._num_read])
        whole = self._decode(self._window)
        is_whole = len(whole) > len(known) and not whole.endswith(REPLACEMENT)
        self._num_waits = 0 if is_whole else self._num_waits + 1
        if not is_whole and self._num_waits < _LONGEST_CHARACTER:
            return ""
        self._window = self._window[self._num_read :]
        self._num_read = len(self._window)
        self._num_waits = 0
        new = whole[len(known) :]
        self._text.write(new)
        return new
