"""Accepts the connections of a socket that several workers share, so that each gets its part.

The kernel wakes all workers for a connection, and the quickest takes it. Agents keep connections
for hours, so a worker that happened to be quick once would go on serving more than the others.
Therefore a worker with more connections than another one leaves it a moment to come first.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from api_proxy.sharing.sharing import Sharing

logger = logging.getLogger(__name__)

_LEAVE_S = 0.005
"""How long a connection is left to workers that have fewer."""
_MOST_LEFT = 4
_HURRY_S = 0.1
"""After so many in a row that nobody else took, none is left for so long: the others are busy."""
_COUNT_EVERY_S = 0.25
"""How often connections are counted that have ended."""
_FULL_PAUSE_S = 1.0
"""For a process that can open no more files."""


class Acceptor:
    """`serve` begins to serve an accepted connection; `count` tells how many are being served."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        serve: Callable[[socket.socket], Coroutine[Any, Any, Any]],
        count: Callable[[], int],
        sharing: Sharing,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listeners = listeners
        self._serve = serve
        self._count = count
        self._sharing = sharing
        self._beginning: set[asyncio.Task[Any]] = set()
        self._num_left = 0
        self._hurry_until = 0.0
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._is_leaving = False
        for listener in listeners:
            listener.setblocking(False)
            self._listen(listener)
        self._counting = asyncio.create_task(self._keep_counted())

    def leave_all(self) -> None:
        """Take only what no other worker takes: this one is about to end."""
        self._is_leaving = True
        self._sharing.set_answering(False)

    def close(self) -> None:
        """Accept no more."""
        self._counting.cancel()
        for timer in self._timers.values():
            timer.cancel()
        for listener in self._listeners:
            self._loop.remove_reader(listener)

    def _listen(self, listener: socket.socket) -> None:
        self._timers.pop(listener.fileno(), None)
        self._loop.add_reader(listener, self._on_connection, listener)

    def _on_connection(self, listener: socket.socket) -> None:
        if not self._leaves_it():
            self._accept(listener)
            return
        self._loop.remove_reader(listener)
        self._later(_LEAVE_S, self._take_what_is_left, listener)

    def _leaves_it(self) -> bool:
        if self._is_leaving:
            return True
        if self._loop.time() < self._hurry_until:
            return False
        fewest = self._sharing.fewest_connections()
        return fewest is not None and fewest < self._total()

    def _take_what_is_left(self, listener: socket.socket) -> None:
        self._listen(listener)
        self._num_left = self._num_left + 1 if self._accept(listener) else 0
        if self._num_left == _MOST_LEFT:
            self._num_left = 0
            self._hurry_until = self._loop.time() + _HURRY_S

    def _accept(self, listener: socket.socket) -> bool:
        """Whether there was a connection."""
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False  # another worker was quicker, or the client has left
        except OSError as error:
            logger.error("no connection can be accepted for a while: %s", error)
            self._loop.remove_reader(listener)
            self._later(_FULL_PAUSE_S, self._listen, listener)
            return False
        connection.setblocking(False)
        task = asyncio.create_task(self._serve(connection))
        self._beginning.add(task)
        task.add_done_callback(self._begun)
        self._tell()
        return True

    def _begun(self, task: asyncio.Task[Any]) -> None:
        self._beginning.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a connection could not be served: %s", error)

    def _later(
        self, seconds: float, do: Callable[[socket.socket], None], listener: socket.socket
    ) -> None:
        self._timers[listener.fileno()] = self._loop.call_later(seconds, do, listener)

    def _total(self) -> int:
        return self._count() + len(self._beginning)

    def _tell(self) -> None:
        self._sharing.set_connections(self._total())

    async def _keep_counted(self) -> None:
        while True:
            self._tell()
            await asyncio.sleep(_COUNT_EVERY_S)
