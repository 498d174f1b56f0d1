"""A request's place among those being answered: the key's limits first, then the trainer's hold,
then the fair queue.

Whoever gets a `Place` must leave it when the reply is over, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from starlette.types import Receive

from api_proxy.access.callers import Caller
from api_proxy.access.hold import GenerationHold
from api_proxy.access.limits import Limits
from api_proxy.access.waiting import Closed, FairQueue, QueueFull
from api_proxy.config import ProxyConfig
from api_proxy.errors import client_gone, queue_full, shutting_down
from api_proxy.metrics import ProxyMetrics
from records.errors import StoreError
from records.keys import Keys
from records.names import Consent

logger = logging.getLogger(__name__)


class Place:
    """Room for `size` replies of a caller, counted until `leave`."""

    def __init__(self, caller: Caller, size: int, queue: FairQueue, limits: Limits) -> None:
        self._caller = caller
        self._size = size
        self._queue = queue
        self._limits = limits

    def used(self, num_tokens: int) -> None:
        """Count tokens of the prompt or of the replies."""
        if self._caller.key is not None:
            self._limits.used(self._caller.key, num_tokens)

    def leave(self) -> None:
        """The replies are over."""
        self._queue.leave(self._caller.scope, self._size)
        if self._caller.key is not None:
            self._limits.end(self._caller.key, self._size)


class Places:
    """All places of one application."""

    def __init__(
        self,
        keys: Keys,
        limits: Limits,
        metrics: ProxyMetrics,
        config: ProxyConfig,
        hold: GenerationHold,
    ) -> None:
        self._keys = keys
        self._limits = limits
        self._metrics = metrics
        self._config = config
        self._hold = hold
        self._queue = FairQueue(config.max_running, config.max_waiting, num_reserved(config))
        metrics.waiting.set_function(lambda: self.num_waiting)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place."""
        return self._queue.num_waiting

    async def take(self, caller: Caller, size: int, receive: Receive) -> Place:
        """Wait for a place, while the client stays. Raises ApiError 429, 499, 503."""
        if caller.key is not None:
            self._limits.begin(caller.key, size)
        try:
            await self._enter(caller, size, receive)
        except BaseException:
            if caller.key is not None:
                self._limits.end(caller.key, size)
            raise
        return Place(caller, size, self._queue, self._limits)

    async def _enter(self, caller: Caller, size: int, receive: Receive) -> None:
        scope = caller.scope
        entering = asyncio.create_task(self._wait_and_enter(caller, size))
        gone = asyncio.create_task(_disconnect(receive))
        try:
            await asyncio.wait({entering, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not entering.done():
                raise client_gone()
            entering.result()
        except QueueFull:
            self._metrics.limited.labels("queue").inc()
            raise queue_full(self._config.retry_after_s) from None
        except Closed:
            raise shutting_down(self._config.retry_after_s) from None
        except BaseException:
            if not entering.cancel() and entering.exception() is None:
                self._queue.leave(scope, size)
            raise
        finally:
            gone.cancel()

    async def _wait_and_enter(self, caller: Caller, size: int) -> None:
        # What does not train cannot get too old to train.
        was_held = caller.consent is Consent.TRAIN and await self._hold.wait()
        await self._queue.enter(caller.scope, size, was_held=was_held)

    def close(self) -> None:
        """Refuse all waiting and all further requests."""
        self._queue.close()
        self._hold.close()

    async def keep_usage(self, stop: asyncio.Event) -> None:
        """Store what keys use, at intervals until `stop`, and once more then."""
        while not stop.is_set():
            await self._save()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), self._config.usage_flush_s)
        await self._save()

    async def _save(self) -> None:
        added, day = self._limits.unsaved(), self._limits.today()
        try:
            if added:
                await self._keys.add_usage(added)
            totals = await self._keys.usage(day)
        except StoreError as error:
            # Still counted here, and added next time.
            logger.warning("use of API keys not stored: %s", type(error).__name__)
        else:
            self._limits.saved(added, totals, day)


def num_reserved(config: ProxyConfig) -> int:
    """Places that are reserved for tenants that have few or none."""
    if config.max_running < 2 or not config.reserved_share:
        return 0
    return max(int(config.max_running * config.reserved_share), 1)


async def _disconnect(receive: Receive) -> None:
    """Returns when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
