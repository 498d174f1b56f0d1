"""Sessions: which conversation a request belongs to, and when it ends.

A session is the one that the client names, the one that its messages continue, or a new one. Names
are remembered in a bounded map, because asking the store (which commits a new session first) would
delay the reply.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from uuid import uuid4

from api_proxy.sharing.sharing import Sharing
from records.errors import StoreError
from records.store import Store

logger = logging.getLogger(__name__)

_KNOWN_NAMES = 10_000


class Sessions:
    """Names and creates sessions, and closes idle ones."""

    def __init__(
        self, store: Store, idle_timeout_s: float, sweep_interval_s: float, sharing: Sharing
    ) -> None:
        self._store = store
        self._sharing = sharing
        self._num_forgotten = sharing.num_forgotten
        self._idle_timeout_s = idle_timeout_s
        self._sweep_interval_s = sweep_interval_s
        self._names: OrderedDict[tuple[str, str], str] = OrderedDict()

    async def named(self, scope: str, name: str) -> str:
        """The id of the session that the client calls `name`; created if needed."""
        if self._num_forgotten != self._sharing.num_forgotten:
            self._num_forgotten = self._sharing.num_forgotten
            self._names.clear()
        known = self._names.get((scope, name))
        if known is not None:
            self._names.move_to_end((scope, name))
            return known
        session_id = await self._store.ensure_session(scope=scope, external_id=name)
        self._names[scope, name] = session_id
        if len(self._names) > _KNOWN_NAMES:
            self._names.popitem(last=False)
        return session_id

    def forget_names(self) -> None:
        """Ask the store for every name again: sessions were deleted."""
        self._sharing.forget_sessions()

    @staticmethod
    def new_id() -> str:
        """An id for a session that starts now; `create` creates it."""
        return uuid4().hex

    async def create(self, scope: str, session_id: str) -> None:
        """Create the session. Its turns keep it from going idle as they are recorded."""
        await self._store.ensure_session(scope=scope, external_id=None, session_id=session_id)

    async def sweep(self, stop: asyncio.Event) -> None:
        """Close idle sessions, at intervals until `stop`."""
        while not stop.is_set():
            try:
                num_dropped = await self._store.close_idle_sessions(self._idle_timeout_s)
                if num_dropped:
                    logger.info("idle sessions closed, %d turns without next state", num_dropped)
            except StoreError as error:
                # The next round tries again; nothing depends on this one.
                logger.warning("could not close idle sessions: %s", error)
            try:
                await asyncio.wait_for(stop.wait(), self._sweep_interval_s)
            except TimeoutError:
                continue
