"""Makes the texts of recorded turns findable, a few at a time, while the endpoint runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from api_proxy.metrics import ProxyMetrics
from records.care.housekeeping import Housekeeping
from records.errors import StoreError
from records.search.indexing import RefusedText
from records.store import Store
from records.store.turns import say_refused

logger = logging.getLogger(__name__)

_AT_ONCE = 50
"""Turns of one transaction: it holds the write lock for some milliseconds."""
_BETWEEN_S = 0.05
_IDLE_S = 2.0
_FAILED_S = 30.0


async def index_texts(store: Store, metrics: ProxyMetrics, stop: asyncio.Event) -> None:
    """Index texts until `stop`, also those of turns that other processes record."""

    def count(refused: RefusedText) -> None:
        metrics.texts_refused.labels(refused.reason.value).inc()
        say_refused(refused)

    keeper = Housekeeping(store, time.time)
    while not stop.is_set():
        try:
            waited = await store.index_texts(_AT_ONCE, count)
            if not waited:
                await keeper.finish_deletions()
            pause = _BETWEEN_S if waited == _AT_ONCE else _IDLE_S
        except StoreError as error:
            logger.error("texts could not be indexed, or taken out: %s", error)
            pause = _FAILED_S
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), pause)
