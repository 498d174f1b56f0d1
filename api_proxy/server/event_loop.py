"""The event loop that the endpoint runs in: asyncio's, which here takes few events at a time.

asyncio serves everything that the selector reports before it looks at its timers again. Ten
thousand clients that hang up at once would block it for 0.3 s, and ten thousand that ask at once
for more than a second. uvloop is faster, but has no limit either, and none can be added.
"""

from __future__ import annotations

import asyncio
import select
import selectors
from collections import deque
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")

_MOST_EVENTS = 8
"""Each may begin a request, whose first step takes about a millisecond."""
_MOST_ASKED_FOR = 128
"""Of the kernel, in one call: the list of ten thousand that are ready takes 10 ms to make. What is
left out comes first the next time (epoll goes round).
"""
_ROUNDS = 4
"""Rounds of the loop that has more to do, in which new events are looked for once: that is a system
call. A round takes well under a millisecond.
"""
_HAS_EPOLL = hasattr(select, "epoll")


class _Epoll:
    """An epoll object that reports `_MOST_ASKED_FOR` at most."""

    def __init__(self, epoll: select.epoll) -> None:
        self._epoll = epoll

    def poll(self, timeout: float | None, maxevents: int) -> list[tuple[int, int]]:
        return self._epoll.poll(timeout, min(maxevents, _MOST_ASKED_FOR))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._epoll, name)


class FewAtATime(selectors.DefaultSelector):
    """Reports at most `most` events at once, and all pending ones before it looks for new ones: a
    client with many connections keeps the others waiting no longer than it takes to serve each
    once. While the loop has other things to do, it looks for new events in one of `rounds` rounds.
    """

    def __init__(self, most: int = _MOST_EVENTS, rounds: int = 1) -> None:
        super().__init__()
        if _HAS_EPOLL and isinstance(self._selector, select.epoll):
            self._selector = _Epoll(self._selector)
        self._most = most
        self._rounds = rounds
        self._waiting: deque[tuple[selectors.SelectorKey, int]] = deque()
        self._num_skipped = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Like any selector; nothing, if the pending events are no longer wanted."""
        if not self._waiting:
            # 0: the loop does not wait, since it has something to do.
            if timeout == 0 and self._num_skipped + 1 < self._rounds:
                self._num_skipped += 1
                return []
            self._num_skipped = 0
            self._waiting.extend(super().select(timeout))
        known = self.get_map()
        reported = [self._waiting.popleft() for _ in range(min(self._most, len(self._waiting)))]
        # A key that was changed, removed or made anew since then is reported again if it is ready.
        return [event for event in reported if known.get(event[0].fd) is event[0]]


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run` in such a loop."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """An event loop of this kind."""
    return asyncio.SelectorEventLoop(FewAtATime(rounds=_ROUNDS))
