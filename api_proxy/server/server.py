"""The proxy as a server of its own: what a stop signal does.

uvicorn alone would close its socket first, so that nobody could be told to come back later, and
wait for streams without a limit. Here the first SIGTERM or SIGINT lets replies end for a while,
with readiness false and new requests refused; a second one ends the wait.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from api_proxy.config import ProxyConfig
from api_proxy.server.accepting import Acceptor
from api_proxy.server.connections import protocol_of
from api_proxy.server.listening import MOST_WAITING
from api_proxy.turns import TurnService

logger = logging.getLogger(__name__)

_LAST_PATIENCE_S = 10
"""For anything that is not a reply to a request for a turn."""
_COLLECT_AFTER = (700, 10, 100)
"""Python's defaults, except that full collections are ten times as rare: with 10,000 connections,
one takes 0.1 s of the loop.
"""
_SWITCH_S = 0.001
"""How long a thread that searches texts keeps the interpreter from the loop. Python's 5 ms add up
if there are several.
"""
_MOST_ACCEPTED = 32
"""Connections that one callback of the event loop accepts; thousands at once would block it."""


class ProxyServer(uvicorn.Server):
    """Serves the application until a signal, and then until its replies have ended."""

    def __init__(self, app: FastAPI, config: ProxyConfig) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=config.host,
                port=config.port,
                backlog=_MOST_ACCEPTED,
                http=protocol_of(config, app.state.service.metrics.refusals),
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
        self._acceptor: Acceptor | None = None

    async def serve(self, sockets: list | None = None) -> None:
        """Serve; returns when all has ended. A worker of several gets the `sockets` that they
        share.
        """
        self._loop = asyncio.get_running_loop()
        sys.setswitchinterval(_SWITCH_S)
        await super().serve(sockets)

    async def startup(self, sockets: list | None = None) -> None:
        """Prepare, and listen."""
        await self._listen(sockets)
        # What was loaded stays: searching it for garbage repeatedly would block the loop.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_COLLECT_AFTER)

    async def _listen(self, sockets: list | None) -> None:
        """Listen. asyncio takes one number for the kernel's queue and for what it accepts at a
        time; here the queue gets its own again.
        """
        sharing = self._service.deps.sharing
        if sockets is not None and sharing.workers > 1:
            await super().startup([])
            self._acceptor = Acceptor(
                sockets, self._begin, lambda: len(self.server_state.connections), sharing
            )
            sharing.set_answering(True)
            return
        await super().startup(sockets)
        for server in self.servers:
            for listener in server.sockets:
                with socket.socket(fileno=os.dup(listener.fileno())) as same:
                    same.listen(MOST_WAITING)

    async def _begin(self, connection: socket.socket) -> None:
        """Serve a connection as uvicorn serves what it accepts itself."""
        assert self._loop is not None

        def protocol() -> asyncio.Protocol:
            made: Any = self.config.http_protocol_class
            return made(
                config=self.config,
                server_state=self.server_state,
                app_state=self.lifespan.state,
                _loop=self._loop,
            )

        await self._loop.connect_accepted_socket(protocol, connection)

    async def shutdown(self, sockets: list | None = None) -> None:
        """Accept no more, and end what is still connected."""
        if self._acceptor is not None:
            self._acceptor.close()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by uvicorn's handler of signals."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._stop, signal.Signals(sig).name)

    def _stop(self, name: str) -> None:
        if self._stopping is not None:
            logger.warning("%s again: not waiting any longer", name)
            self._service.replies.hurry()
            return
        logger.info("%s: replies may end, no new ones begin", name)
        if self._acceptor is not None:
            self._acceptor.leave_all()
        self._stopping = asyncio.create_task(self._end_replies())

    async def _end_replies(self) -> None:
        try:
            await self._service.stop()
        finally:
            self.should_exit = True
