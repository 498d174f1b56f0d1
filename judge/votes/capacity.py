"""How much of the traffic the judge keeps up with: its pace, and the share of turns it sees in
time. Values of this process over the last minutes; needs no store and no judge.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 300.0
"""Figures are those of the last five minutes."""
_NEWEST = 0.1
"""Weight of the newest turn in the mean duration."""


class Capacity:
    """Counts turns judged in time to train, and turns skipped instead; `clock` in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun_at = clock()
        self._events: deque[tuple[float, int, int]] = deque()
        self._judged = self._let_go = 0
        self._turn_s: float | None = None

    def judged(self, seconds: float) -> None:
        """Count a turn that was judged while it could still train, and that took `seconds`."""
        self._add(1, 0)
        newest = _NEWEST if self._turn_s is not None else 1.0
        self._turn_s = newest * seconds + (1 - newest) * (self._turn_s or 0.0)

    def let_go(self, number: int) -> None:
        """Count turns that became too old to train before they were judged."""
        if number:
            self._add(0, number)

    @property
    def turn_s(self) -> float:
        """Seconds that a turn takes from its claim to its verdict; 0 before the first."""
        return self._turn_s or 0.0

    def share(self) -> float:
        """Share of the turns that were judged in time; NaN while there was none."""
        self._forget()
        total = self._judged + self._let_go
        return self._judged / total if total else float("nan")

    def turns_per_second(self) -> float:
        """Turns judged in time, per second."""
        self._forget()
        seconds = min(self._clock() - self._begun_at, WINDOW_S)
        return self._judged / seconds if seconds > 0 else 0.0

    def _add(self, judged: int, let_go: int) -> None:
        now = self._clock()
        last = self._events[-1] if self._events else None
        if last is not None and int(last[0]) == int(now):  # one entry a second: it stays small
            self._events[-1] = (last[0], last[1] + judged, last[2] + let_go)
        else:
            self._events.append((now, judged, let_go))
        self._judged += judged
        self._let_go += let_go
        self._forget()

    def _forget(self) -> None:
        oldest = self._clock() - WINDOW_S
        while self._events and self._events[0][0] < oldest:
            _, judged, let_go = self._events.popleft()
            self._judged -= judged
            self._let_go -= let_go
