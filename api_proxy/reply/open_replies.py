"""The replies in progress, and how they end when the proxy is told to stop.

From then on, new requests are refused and readiness says so. For a while, replies may end by
themselves; those left then are aborted at the engine, told so, and recorded as `shutdown`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Protocol

logger = logging.getLogger(__name__)

_CUT_PATIENCE_S = 5.0
"""How long to wait until replies that were cut off are recorded."""


class OpenReply(Protocol):
    """A reply that can be cut off."""

    async def cut(self) -> None: ...


class OpenReplies:
    """All replies of one application that have not ended."""

    def __init__(self) -> None:
        self._open: set[OpenReply] = set()
        self._ended = asyncio.Event()
        self.is_closing = False
        self._is_hurried = False

    def add(self, reply: OpenReply) -> None:
        """A reply begins."""
        self._open.add(reply)

    def discard(self, reply: OpenReply) -> None:
        """A reply is over."""
        self._open.discard(reply)
        self._ended.set()

    async def close(self, grace_s: float) -> int:
        """Let replies end, for `grace_s`, and cut off the others; returns how many were cut off."""
        self.is_closing = True
        await self._ends(grace_s)
        if not self._open:
            return 0
        left = list(self._open)
        logger.warning("%d replies are cut off: the proxy is stopping", len(left))
        await asyncio.gather(*(reply.cut() for reply in left))
        self._is_hurried = False
        await self._ends(_CUT_PATIENCE_S)
        if self._open:
            logger.error("%d replies do not end", len(self._open))
        return len(left)

    def hurry(self) -> None:
        """Wait no longer for replies to end by themselves."""
        self._is_hurried = True
        self._ended.set()

    async def _ends(self, patience_s: float) -> None:
        """Returns when no reply is open, or when it is time to go on anyway."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while self._open and not self._is_hurried:
                    self._ended.clear()
                    await self._ended.wait()
