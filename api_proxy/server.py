"""The proxy as a server of its own: what a signal to stop does.

uvicorn alone would close its socket first, so that nobody could be told to come back later, and
wait for streams without an end. Here the first SIGTERM or SIGINT lets replies end for a while, with
readiness false and new requests refused; a second one ends the wait.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from types import FrameType

import uvicorn
from fastapi import FastAPI

from api_proxy.config import ProxyConfig
from api_proxy.turns import TurnService

logger = logging.getLogger(__name__)

_LAST_PATIENCE_S = 10
"""For whatever is no reply to a request for a turn."""


class ProxyServer(uvicorn.Server):
    """Serves the application until a signal, and then until its replies have ended."""

    def __init__(self, app: FastAPI, config: ProxyConfig) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=config.host,
                port=config.port,
                loop="uvloop",
                http="httptools",
                # Agents pause between turns: a connection closed under them costs a retry.
                timeout_keep_alive=75,
                timeout_graceful_shutdown=_LAST_PATIENCE_S,
                access_log=False,
                log_config=None,
            )
        )
        self._service: TurnService = app.state.service
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Task[None] | None = None

    async def serve(self, sockets: list | None = None) -> None:
        """Serve; returns when all has ended."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by uvicorn's handler of signals."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._stop, signal.Signals(sig).name)

    def _stop(self, name: str) -> None:
        if self._stopping is not None:
            logger.warning("%s again: not waiting any longer", name)
            self._service.replies.hurry()
            return
        logger.info("%s: replies may end, no more are begun", name)
        self._stopping = asyncio.create_task(self._end_replies())

    async def _end_replies(self) -> None:
        try:
            await self._service.stop()
        finally:
            self.should_exit = True
