"""Deletes sessions that are older than the configuration allows, while the endpoint runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from api_proxy.linking.sessions import Sessions
from api_proxy.metrics import ProxyMetrics
from records.care.housekeeping import Housekeeping
from records.config import RetentionConfig
from records.errors import StoreError

logger = logging.getLogger(__name__)


async def sweep(
    housekeeping: Housekeeping,
    config: RetentionConfig,
    metrics: ProxyMetrics,
    sessions: Sessions,
    stop: asyncio.Event,
) -> None:
    """Delete expired sessions, at intervals until `stop`; returns at once if none expire."""
    while config.max_age_days is not None and not stop.is_set():
        try:
            gone = await housekeeping.expire(config.max_age_days)
        except StoreError as error:
            # The next round tries again.
            logger.error("expired sessions could not be deleted: %s", error)
        else:
            metrics.expired_sessions.inc(gone.num_sessions)
            metrics.expired_turns.inc(gone.num_turns)
            metrics.expired_answers.inc(gone.num_answers)
            if gone.num_sessions:
                sessions.forget_names()
                logger.info(
                    "retention: %d sessions, %d turns deleted", gone.num_sessions, gone.num_turns
                )
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), config.sweep_interval_s)
