"""Which requests are answered now and which wait: a bounded queue, fair among tenants.

At most `max_running` replies are sampled at a time. Further requests wait; the next free place goes
to the tenant that has the fewest replies running, among equals to the one that was served longest
ago, so a burst of one tenant delays another by at most one turn. Some places are reserved for
tenants that have few or none: replies that do not end would otherwise take them all. When the queue
is full, the newest request of the tenant with the most waiting requests is refused, which may be
the one that just came.

Independent of HTTP and keys.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass, field


class QueueFull(Exception):
    """The request must be sent again later."""


class Closed(Exception):
    """No further reply begins."""


@dataclass(slots=True, eq=False)
class _Waiter:
    size: int
    was_held: bool = False
    place: asyncio.Future[None] = field(default_factory=asyncio.Future)

    @property
    def is_gone(self) -> bool:
        """Whether its client has left; its task is told a moment later, and withdraws it."""
        return self.place.cancelled()


class FairQueue:
    """Places for `max_running` replies and `max_waiting` requests. A tenant leaves as many places
    free as it has, at most `num_reserved`.
    """

    def __init__(self, max_running: int, max_waiting: int, num_reserved: int = 0) -> None:
        assert num_reserved < max_running
        self._max_running = max_running
        self._num_reserved = num_reserved
        self._max_waiting = max_waiting
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[_Waiter]] = {}
        self._served: Counter[str] = Counter()
        self._num_served = 0
        self._num_held = 0
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return sum(len(waiters) for waiters in self._waiting.values())

    async def enter(self, tenant: str, size: int = 1, *, was_held: bool = False) -> None:
        """Wait for `size` places (never more than there are). Whoever enters must leave. A request
        that `was_held` before is not refused and takes no room from others, because all held
        requests come at once.

        Raises QueueFull at once or, if another tenant needs the room, later; Closed at the end.
        """
        if self._is_closed:
            raise Closed
        waiter = _Waiter(min(size, self._max_running), was_held)
        self._waiting.setdefault(tenant, deque()).append(waiter)
        self._begin_next()
        self._num_held += was_held
        if self.num_waiting - self._num_held > self._max_waiting and not waiter.place.done():
            self._refuse_newest(tenant)
        try:
            await waiter.place
        except asyncio.CancelledError:
            if waiter.place.done() and not waiter.place.cancelled():
                # It was given a place just as it was cancelled.
                if waiter.place.exception() is None:
                    self.leave(tenant, size)
            else:
                self._withdraw(tenant, waiter)
            raise
        finally:
            self._num_held -= was_held

    def leave(self, tenant: str, size: int = 1) -> None:
        """Give the places back."""
        self._running[tenant] -= min(size, self._max_running)
        self._begin_next()
        if not self._running[tenant]:
            del self._running[tenant]
            if tenant not in self._waiting:
                del self._served[tenant]

    def close(self) -> None:
        """Refuse all waiting and all further requests."""
        self._is_closed = True
        for waiters in self._waiting.values():
            for waiter in waiters:
                if not waiter.is_gone:
                    waiter.place.set_exception(Closed())
        self._waiting.clear()

    def _begin_next(self) -> None:
        while self._waiting:
            tenant = min(self._waiting, key=lambda one: (self._running[one], self._served[one]))
            waiters = self._waiting[tenant]
            if waiters[0].is_gone:
                waiters.popleft()
                self._drop_empty(tenant)
                continue
            # The others that wait have as many or more, so they would have to leave as many or
            # more.
            kept = min(self._num_reserved, self._running[tenant])
            if self._running.total() + waiters[0].size > self._max_running - kept:
                return
            waiter = waiters.popleft()
            self._drop_empty(tenant)
            self._running[tenant] += waiter.size
            self._num_served += 1
            self._served[tenant] = self._num_served
            waiter.place.set_result(None)

    def _refuse_newest(self, came: str) -> None:
        """That of the tenant with the most waiting, or `came`'s if that one was held."""
        tenant = max(self._waiting, key=lambda one: len(self._waiting[one]))
        if self._waiting[tenant][-1].was_held:
            tenant = came
        newest = self._waiting[tenant].pop()
        if not newest.is_gone:
            newest.place.set_exception(QueueFull())
        self._drop_empty(tenant)

    def _withdraw(self, tenant: str, waiter: _Waiter) -> None:
        if tenant in self._waiting and waiter in self._waiting[tenant]:
            self._waiting[tenant].remove(waiter)
            self._drop_empty(tenant)
            self._begin_next()

    def _drop_empty(self, tenant: str) -> None:
        if not self._waiting[tenant]:
            del self._waiting[tenant]
