"""What the agents' side saw: which turns were acknowledged, and which replies broke off.

A turn is acknowledged once the last byte of its reply has arrived: the end of a whole reply, or
`data: [DONE]`. It is written down at that moment, from the wire, below the official client; none of
the project's code takes part.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx

_DONE = b"data: [DONE]"


class ClientLog:
    """Appends the ids of acknowledged turns to a file, a line each, and counts broken replies."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1, encoding="ascii")
        self.acknowledged: set[str] = set()
        self.num_broken = 0
        """Requests that were sent, and whose reply ended before its end."""
        self.num_open = 0
        """Requests that were sent and have no end yet."""

    def acknowledge(self, turn_id: str) -> None:
        """The agent has the whole reply."""
        if turn_id not in self.acknowledged:
            self.acknowledged.add(turn_id)
            self._file.write(turn_id + "\n")

    def close(self) -> None:
        """The file is complete."""
        self._file.close()


class LoggingTransport(httpx.AsyncBaseTransport):
    """Sends requests, and tells the log how their replies end."""

    def __init__(self, log: ClientLog) -> None:
        self._log = log
        self._inner = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=200))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """One exchange; raises what the network does."""
        self._log.num_open += 1
        try:
            response = await self._inner.handle_async_request(request)
        except BaseException as error:
            self._log.num_open -= 1
            if isinstance(error, httpx.TransportError) and not isinstance(
                error, httpx.ConnectError
            ):
                self._log.num_broken += 1
            raise
        stream = response.stream
        assert isinstance(stream, httpx.AsyncByteStream)
        turn_id = response.headers.get("x-turn-id") if response.status_code == 200 else None
        is_events = response.headers.get("content-type", "").startswith("text/event-stream")
        response.stream = _Watched(stream, self._log, turn_id, is_events)
        return response

    async def aclose(self) -> None:
        """Close all connections."""
        await self._inner.aclose()


class _Watched(httpx.AsyncByteStream):
    """A reply as it is read. `turn_id` is None for a refusal."""

    def __init__(
        self, inner: httpx.AsyncByteStream, log: ClientLog, turn_id: str | None, is_events: bool
    ) -> None:
        self._inner, self._log, self._turn_id, self._is_events = inner, log, turn_id, is_events
        self._is_open = True
        self._has_all = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        tail = b""
        try:
            async for data in self._inner:
                tail = (tail + data)[-64:]
                if self._is_events and _DONE in tail:
                    # The client reads no further than this.
                    self._complete()
                yield data
        except httpx.TransportError:
            if not self._has_all:
                self._log.num_broken += 1
            raise
        if not self._is_events:
            self._complete()

    def _complete(self) -> None:
        self._has_all = True
        if self._turn_id is not None:
            self._log.acknowledge(self._turn_id)

    async def aclose(self) -> None:
        if self._is_open:
            self._is_open = False
            self._log.num_open -= 1
        await self._inner.aclose()
