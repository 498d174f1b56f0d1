"""Live requests first: lines of waiting requests, and the time and rows that the others may take.

One engine may serve the policy to agents and also work for judge and teacher. Requests that agents
wait for start first. Background work (votes, scores, a priority below 0) gets the remaining time,
in smaller pieces, and runs at full speed whenever no agent waits. Spare requests come last, and
only to rows that agents do not need.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import takewhile

from rollout_bridge.embedded.model.rows import LongRequest
from rollout_bridge.embedded.scheduling.request import EngineRequest

BACKGROUND_SHARE = 1 / 3
"""Background work's share of the time while live requests are at work too."""
CONTENDED_PIECE = 4
"""How many times smaller the pieces of background work are then."""


@dataclass(slots=True, kw_only=True)
class Line:
    """Requests that wait for a row, and the long one among them that is computed in pieces."""

    waiting: deque[EngineRequest] = field(default_factory=deque)
    long: LongRequest | None = None

    @property
    def requests(self) -> list[EngineRequest]:
        """All of them."""
        begun = [] if self.long is None else [self.long.request]
        return [*begun, *self.waiting]

    def add(self, request: EngineRequest) -> None:
        """Insert it after all waiting requests of its priority or a higher one."""
        place = len(self.waiting)
        if request.priority > 0:
            ahead = (one.priority >= request.priority for one in self.waiting)
            place = sum(1 for _ in takewhile(bool, ahead))
        self.waiting.insert(place, request)

    def put_long_back(self) -> None:
        """Discard what was computed of the long request: it starts over."""
        if self.long is not None:
            self.waiting.appendleft(self.long.request)
            self.long = None

    def remove(self, request: EngineRequest) -> None:
        """Take a request out, if it is here."""
        if request in self.waiting:
            self.waiting.remove(request)
        if self.long is not None and self.long.request is request:
            self.long = None


class BackgroundTime:
    """After t seconds of background work, live requests, if any, get their share before more of it
    starts.
    """

    def __init__(self, share: float = BACKGROUND_SHARE) -> None:
        self._owed_per_second = (1 - share) / share
        self._owed_s = 0.0

    def may_begin(self, *, is_contended: bool) -> bool:
        """Whether background work may start now; `is_contended`: live requests are at work."""
        if not is_contended:
            self._owed_s = 0.0
        return self._owed_s <= 0

    def took(self, *, live_s: float, background_s: float) -> None:
        """Record what the last turn of the loop took."""
        self._owed_s += background_s * self._owed_per_second - live_s
        self._owed_s = max(self._owed_s, 0.0)
