"""Counts what is refused because of its size, and says so in the log without flooding it."""

from __future__ import annotations

import logging
import time
from collections import Counter

from prometheus_client import Counter as Metric

logger = logging.getLogger(__name__)

_PAUSE_S = 60.0


class Refusals:
    """One for each application; at most one line a minute for each limit."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._said_at: dict[str, float] = {}
        self._unsaid: Counter[str] = Counter()

    def note(self, limit: str) -> None:
        """Something was refused, or ended, by this limit."""
        self._metric.labels(limit).inc()
        self._unsaid[limit] += 1
        now = time.monotonic()
        if now - self._said_at.get(limit, -_PAUSE_S) < _PAUSE_S:
            return
        self._said_at[limit] = now
        number = self._unsaid.pop(limit)
        logger.warning("limit '%s' reached: %d refused since this was last logged", limit, number)
