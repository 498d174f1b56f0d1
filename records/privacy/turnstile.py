"""Lets one thread at a time search texts, a slice each, in the order in which they came.

Searching is Python code that holds the interpreter. With a single thread that does so, the event
loop gets the interpreter back after one switch interval; with several it competes with all of them.
And a short text is searched between two slices of a long one.
"""

from __future__ import annotations

import time
from collections import deque
from threading import Lock
from types import TracebackType

_SLICE_S = 0.01


class Turnstile:
    """A lock that is handed on in order: `with` it, and `pause` now and then."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._is_taken = False
        self._waiting: deque[Lock] = deque()
        self._since = 0.0

    def __enter__(self) -> None:
        with self._lock:
            is_free = not self._is_taken
            self._is_taken = True
            if not is_free:
                gate = Lock()
                gate.acquire()
                self._waiting.append(gate)
        if not is_free:
            gate.acquire()
        self._since = time.monotonic()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_taken = False

    def pause(self) -> None:
        """If the slice of the thread that is within has passed, let the next one in first."""
        if self._waiting and time.monotonic() - self._since >= _SLICE_S:
            self.__exit__(None, None, None)
            self.__enter__()
