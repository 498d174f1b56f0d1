"""How many answers the policy's engine gives at a time to requests that no agent waits for.

Some seats are always there, whatever agents ask; their requests start first. Others are for rows of
the engine that nothing else uses.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

Seat = Literal["own", "spare"]

_ORDER: tuple[Seat, Seat] = ("own", "spare")


class Seats:
    """`own` seats, taken first, and `spare` ones; samplers may share them."""

    def __init__(self, own: int, spare: int = 0) -> None:
        self.own, self.total = own, own + spare
        self._free: asyncio.PriorityQueue[int] = asyncio.PriorityQueue()
        for number in range(self.total):
            self._free.put_nowait(int(number >= own))

    @asynccontextmanager
    async def one(self) -> AsyncIterator[Seat]:
        """A seat for one answer; waits until one is free."""
        order = await self._free.get()
        try:
            yield _ORDER[order]
        finally:
            self._free.put_nowait(order)
