"""Requests wait here while the trainer's schedule holds generation (docs/schedules.md).

The hold is read only when needed: once for each request that comes, and by one task for all
requests while some wait. None is refused because of it, and a client that leaves is not waited for.
"""

from __future__ import annotations

import asyncio
import logging

from api_proxy.metrics import ProxyMetrics
from rollout_bridge.engine.hold_file import HoldFile, HoldOrder

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.02
"""Pause between two checks whether a hold has ended, while requests wait."""


class GenerationHold:
    """Whether the trainer of a run holds new generation; without a file, nothing ever waits."""

    def __init__(self, file: HoldFile | None, metrics: ProxyMetrics) -> None:
        self._file = file
        self._metrics = metrics
        self._ended: asyncio.Event | None = None
        self._looking: asyncio.Task[None] | None = None
        self._num_waiting = 0
        self._is_closed = False
        metrics.held.set_function(lambda: self._num_waiting)

    async def wait(self) -> bool:
        """Wait until generation may begin; returns whether the request had to wait."""
        if self._file is None or self._is_closed:
            return False
        ended = self._ended
        if ended is None:
            order = self._file.holds()
            if order is None:
                return False
            ended = self._ended = asyncio.Event()
            self._looking = asyncio.create_task(self._look(self._file, order, ended))
        started = asyncio.get_running_loop().time()
        self._metrics.held_requests.inc()
        self._num_waiting += 1
        try:
            await ended.wait()
        finally:
            self._num_waiting -= 1
            self._metrics.held_s.observe(asyncio.get_running_loop().time() - started)
        return True

    def close(self) -> None:
        """The endpoint is closing: let all requests through, so that they can be told so."""
        self._is_closed = True
        if self._ended is not None:
            self._ended.set()

    async def _look(self, file: HoldFile, order: HoldOrder, ended: asyncio.Event) -> None:
        logger.info("requests wait: %s", order.why)
        try:
            while isinstance(found := file.current(), HoldOrder) and not ended.is_set():
                await asyncio.sleep(LOOK_EVERY_S)
            if isinstance(found, HoldOrder):
                return
            self._metrics.holds.labels(found).inc()
            if found == "max_hold":
                seconds = order.until - order.since
                logger.warning(
                    "requests no longer wait: training took longer than trainer.max_hold_s = %g",
                    seconds,
                )
            elif found == "trainer_gone":
                logger.warning("requests no longer wait: the trainer that held them has ended")
        finally:
            self._ended = None
            ended.set()
