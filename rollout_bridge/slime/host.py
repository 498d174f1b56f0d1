"""One background thread with an event loop that lives as long as slime's rollout process.

slime calls plugins on its main thread, one call at a time, and does nothing else meanwhile. The
store is asynchronous and its leases must be kept alive between calls, so it lives here. Calls wait
for their answer in short slices, so that signals reach the main thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from records.errors import StoreUnavailable
from records.store import Store
from rollout_bridge.slime.patience import patiently
from rollout_bridge.slime.probes import Probe, score_probes
from rollout_bridge.slime.settings import SlimeSettings
from rollout_bridge.slime.source import LeasedTurns, TurnSource

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SLICE_S = 1.0
_SAVE_WAIT_S = 30.0


class TurnHost:
    """The turn source of a job, for callers that block. Raises what the source raises."""

    def __init__(self, settings: SlimeSettings, *, needs_experts: bool = False) -> None:
        self._settings = settings
        self._needs_experts = needs_experts
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="hindsight-turns", daemon=True
        )
        self._thread.start()
        self._source: TurnSource | None = None
        self._store: Store | None = None
        self._holding: asyncio.Task[None] | None = None

    def resume(self, rollout_id: int) -> None:
        """Open the store and make it equal to slime's checkpoint of a rollout (-1: the start)."""
        self._wait(self._resume(rollout_id))

    def next_batch(self, rollout_id: int) -> LeasedTurns:
        """See `TurnSource.next_batch`."""
        return self._wait(self._opened().next_batch(rollout_id))

    def probes(self, url: str) -> list[Probe]:
        """See `score_probes`."""
        return self._wait(score_probes(self._settings.probes, url))

    def checkpointed(self, rollout_id: int) -> None:
        """`TurnSource.checkpointed`; if the store does not answer, the background tries again."""
        future = self._submit(self._opened().checkpointed(rollout_id))
        try:
            self._result(future, _SAVE_WAIT_S)
        except (StoreUnavailable, TimeoutError) as error:
            logger.warning(
                "the steps up to rollout %d will be marked trained later: the store does not "
                "answer: %s",
                rollout_id,
                error or "no answer",
            )

    def close(self) -> None:
        """Stop the thread and disconnect. Leases stay: what was handed over may yet be trained."""
        self._wait(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _resume(self, rollout_id: int) -> None:
        if self._store is None:
            self._store = await self._open_store()
        source = TurnSource(self._store, self._settings, needs_experts=self._needs_experts)
        await source.resume(rollout_id)
        self._source = source
        await self._stop_holding()
        self._holding = asyncio.create_task(source.hold())

    async def _open_store(self) -> Store:
        return await patiently(self._settings.handover, lambda: Store.open(self._settings.store))

    async def _close(self) -> None:
        await self._stop_holding()
        if self._source is not None:
            self._source.end_hold()
        if self._store is not None:
            await self._store.close()

    async def _stop_holding(self) -> None:
        if self._holding is not None:
            self._holding.cancel()
            await asyncio.gather(self._holding, return_exceptions=True)

    def _opened(self) -> TurnSource:
        if self._source is None:
            raise RuntimeError("slime asked for turns before it loaded its checkpoint")
        if self._holding is not None and self._holding.done():
            self._holding.result()
        return self._source

    def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self._result(self._submit(work))

    def _result(self, future: concurrent.futures.Future[T], timeout_s: float = float("inf")) -> T:
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            done, _ = concurrent.futures.wait([future], timeout=min(_SLICE_S, left_s))
            if done:
                return future.result()
