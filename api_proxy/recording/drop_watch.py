"""Warns at once when every turn of a session or key is dropped.

Turns are counted as they are recorded. What is decided later, when a session ends, by the judge or
by the trainer, is read from the store now and then. What was found is not shown here, only its kind
and place; `opd doctor` shows more.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time

from prometheus_client import Gauge

from api_proxy.access.callers import ANONYMOUS, Caller
from api_proxy.metrics import ProxyMetrics
from records.errors import StoreError
from records.keys import ApiKey
from records.names import DropReason
from records.reading.drop_streaks import DropStreaks, Streak
from records.reading.outcomes import TurnOutcome
from records.store import Store

logger = logging.getLogger(__name__)

_OF_LATE_S = 24 * 3600.0
"""Clients that have sent nothing for longer are no longer warned about."""
_LINE_EVERY_S = 30.0
_KEY_ID = re.compile(r"[0-9a-f]{12}")
_MOST_TOLD = 5


class DropWatch:
    """The watch of one application. Only one that `says_later` logs what it read in the store: all
    workers read the same.
    """

    def __init__(
        self, store: Store, metrics: ProxyMetrics, interval_s: float, *, says_later: bool = True
    ) -> None:
        self._store = store
        self._interval_s = interval_s
        self._says_later = says_later
        self._recorded = DropStreaks()
        self._later = DropStreaks()
        self._last_line = float("-inf")
        gauge = Gauge(
            "opd_dropping_all",
            "Recent sessions and keys whose every turn is dropped. If not 0, see /readyz, doctor.",
            registry=metrics.registry,
        )
        gauge.set_function(lambda: len(self._told()))

    def recorded(
        self, caller: Caller, session_id: str, reason: DropReason | None, detail: str | None
    ) -> None:
        """Count a turn of a main conversation, dropped or kept when it was recorded."""
        now = time.time()
        who = (_client(caller.scope, caller.key), f"session {session_id}")
        for one in who:
            self._recorded.add(one, now, reason, detail)
        long = [streak for one in who if (streak := self._recorded.get(one)) is not None]
        if long and reason is not None:
            self._say(long[0])

    def warnings(self) -> list[str]:
        """A line for each session and key whose turns are all dropped, the longest streak first."""
        return [streak.words() for streak in self._told()[:_MOST_TOLD]]

    def _told(self) -> list[Streak]:
        after = time.time() - _OF_LATE_S
        told = (*self._later.told(), *self._recorded.told(after))
        known = {streak.who: streak for streak in told}
        return sorted(known.values(), key=lambda streak: -streak.number)

    async def watch(self, stop: asyncio.Event) -> None:
        """Read what was decided later, at intervals until `stop`."""
        while not stop.is_set():
            try:
                self.read(await self._store.recent_outcomes())
            except StoreError as error:
                logger.warning("could not read what became of turns: %s", error)
            try:
                await asyncio.wait_for(stop.wait(), self._interval_s)
            except TimeoutError:
                continue

    def read(self, outcomes: list[TurnOutcome]) -> None:
        """Replace what was known with what became of the newest turns."""
        later = DropStreaks()
        for one in outcomes:
            later.add(f"session {one.session_id}", one.created_at, one.reason, one.detail)
            # Everybody may ask whether the endpoint is ready, so tenants are not named.
            later.add(_client(one.scope), one.created_at, one.reason, one.detail)
        self._later = later
        told = later.told()
        if told and self._says_later:
            self._say(told[0])

    def _say(self, streak: Streak) -> None:
        now = time.monotonic()
        if now - self._last_line < _LINE_EVERY_S:
            return
        self._last_line = now
        logger.warning("%s; `opd doctor` says what can be done", streak.words())


def _client(scope: str, key: ApiKey | None = None) -> str:
    """A client's name that anybody may read: the public id of its key, or part of a hash."""
    if key is not None:
        return f"key {key.key_id}"
    tenant = scope.removeprefix("tenant:")
    if tenant != scope:
        return f"key {tenant}" if _KEY_ID.fullmatch(tenant) else "a tenant of several keys"
    return "clients without a key" if scope == ANONYMOUS else f"client {scope[:8]}"
