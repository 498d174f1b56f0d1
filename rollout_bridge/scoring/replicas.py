"""Several engines with the same weights: they take turns, and one that is ill is left out."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from rollout_bridge.engine.errors import EngineUnavailable

logger = logging.getLogger(__name__)

ILL_S = 30.0
"""How long an engine that did not answer is asked only if all others are ill too."""

Engine = TypeVar("Engine")
Result = TypeVar("Result")


class Replicas(Generic[Engine]):
    """Engines of one kind. `now`: seconds, for tests."""

    def __init__(
        self, engines: Sequence[Engine], *, now: Callable[[], float] = time.monotonic
    ) -> None:
        if not engines:
            raise ValueError("no engine")
        self.all = tuple(engines)
        self._now, self._next = now, 0
        self._ill_until = [0.0] * len(self.all)

    async def first(self, ask: Callable[[Engine], Awaitable[Result]]) -> Result:
        """The first answer, beginning with the engine whose turn it is. Raises EngineUnavailable,
        the last one's, if none answers; whatever else `ask` raises ends the search.
        """
        order = self._order()
        for place, number in enumerate(order):
            try:
                result = await ask(self.all[number])
            except EngineUnavailable as error:
                self._ill_until[number] = self._now() + ILL_S
                if place == len(order) - 1:
                    raise
                logger.warning("%s; another engine of this teacher is asked", error)
            else:
                self._ill_until[number] = 0.0
                return result
        raise AssertionError("unreachable: there is an engine")

    def _order(self) -> list[int]:
        """From the next one on, ill ones last."""
        count = len(self.all)
        turn = [(self._next + place) % count for place in range(count)]
        self._next = (self._next + 1) % count
        now = self._now()
        return sorted(turn, key=lambda number: self._ill_until[number] > now)
