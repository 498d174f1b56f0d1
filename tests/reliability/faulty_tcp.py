"""A pass-through before a database server, whose connections can be refused, reset and stalled."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field


@dataclass
class FaultyTcp:
    """Listens on a port of its own and forwards bytes; an async context manager."""

    host: str
    port: int
    own_port: int = 0
    _flows: asyncio.Event = field(default_factory=asyncio.Event)
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def __aenter__(self) -> FaultyTcp:
        self._flows.set()
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._flows.set()
        await self.refuse()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def listen(self) -> None:
        """Accept connections, always on the same port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.own_port)
        self.own_port = self._server.sockets[0].getsockname()[1]

    async def refuse(self) -> None:
        """Refuse connections until `listen`, and reset those that are open."""
        self._server.close()
        self.reset()

    def reset(self) -> None:
        """Reset every connection at this instant, whatever is on its way."""
        for writer in self._writers:
            writer.transport.abort()

    def stall(self) -> None:
        """Let nothing through until `flow`; connections stay open."""
        self._flows.clear()

    def flow(self) -> None:
        """Let bytes through again, those that waited first."""
        self._flows.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(self.host, self.port)
        self._writers |= {writer, server_writer}
        for source, target in ((reader, server_writer), (server_reader, writer)):
            task = asyncio.create_task(self._copy(source, target))
            self._tasks.add(task)

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                await self._flows.wait()
                target.write(data)
                await target.drain()
        target.close()
