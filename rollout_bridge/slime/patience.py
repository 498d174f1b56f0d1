"""Patience with a store that is down: a job of slime waits for it, but not for ever."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from records.errors import StoreUnavailable
from rollout_bridge.slime.settings import HandoverConfig

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def patiently(handover: HandoverConfig, ask: Callable[[], Awaitable[T]]) -> T:
    """The answer of the store. Raises StoreUnavailable after `store_patience_s` without one."""
    started = time.monotonic()
    while True:
        try:
            return await ask()
        except StoreUnavailable as error:
            await wait_for_store(handover, time.monotonic() - started, error)


async def wait_for_store(
    handover: HandoverConfig, silent_s: float, error: StoreUnavailable
) -> None:
    """Pause; raises StoreUnavailable when it has been silent for too long."""
    if silent_s >= handover.store_patience_s:
        raise StoreUnavailable(
            f"the store has not answered for {silent_s:.0f} s: {error}"
        ) from error
    logger.warning("waiting for the store (%.0f s so far): %s", silent_s, error)
    await asyncio.sleep(handover.poll_interval_s)
