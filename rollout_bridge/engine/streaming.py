"""Server-sent events of one streamed generation, as they arrive.

It does not interpret the events.
"""

from __future__ import annotations

import asyncio
import contextlib

import aiohttp

from rollout_bridge.engine.errors import EngineUnavailable

_DONE = b"[DONE]"
_SEPARATOR = b"\n\n"
_DRAIN_TIMEOUT_S = 1.0


class EventStream:
    """The events of one response; `request_id` is the id the request was sent with."""

    def __init__(self, response: aiohttp.ClientResponse, request_id: str):
        self._response = response
        self._buffer = b""
        self.request_id = request_id

    async def next(self, timeout_s: float) -> list[bytes]:
        """The events (JSON) that have arrived since, oldest first; waits for one if there is none.

        Raises EngineUnavailable when nothing comes within `timeout_s` seconds, when the connection
        breaks, or when the stream ends.
        """
        while True:
            arrived = self._take()
            if arrived:
                return arrived
            data = await self._read(timeout_s)
            if not data:
                raise EngineUnavailable("the stream ended before the generation did")
            self._buffer += data

    async def drain(self) -> None:
        """Read what follows the last event, so that the connection can be used again."""
        with contextlib.suppress(EngineUnavailable):
            while await self._read(_DRAIN_TIMEOUT_S):
                pass

    def close(self) -> None:
        """Return the connection; one with unread data is closed, which the engine notices."""
        self._response.release()

    async def _read(self, timeout_s: float) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._response.content.readany()
        except TimeoutError as error:
            raise EngineUnavailable(f"no token within {timeout_s} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnavailable(f"stream broken: {type(error).__name__}: {error}") from error

    def _take(self) -> list[bytes]:
        end = self._buffer.rfind(_SEPARATOR)
        if end < 0:
            return []
        complete, self._buffer = self._buffer[:end], self._buffer[end + len(_SEPARATOR) :]
        events = (part.removeprefix(b"data:").strip() for part in complete.split(_SEPARATOR))
        return [event for event in events if event and event != _DONE]
