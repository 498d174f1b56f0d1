"""Server-sent events of one streamed generation, read as they arrive.

Events are cumulative, so of several that arrived together only the last is parsed. It does not know
what the events mean.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import aiohttp
import orjson

from rollout_bridge.engine.errors import EngineProtocolError, EngineUnavailable

_DONE = b"[DONE]"
_SEPARATOR = b"\n\n"
_DRAIN_TIMEOUT_S = 1.0


class EventStream:
    """The events of one response; `request_id` is the id the request was sent with."""

    def __init__(self, response: aiohttp.ClientResponse, request_id: str):
        self._response = response
        self._buffer = b""
        self.request_id = request_id

    async def next(self, timeout_s: float) -> Any:
        """The newest event that has arrived, waiting for one if there is none.

        Raises EngineUnavailable when nothing comes within `timeout_s` seconds, when the connection
        breaks, or when the stream ends; EngineProtocolError when an event is not JSON.
        """
        while True:
            newest = self._take_newest()
            if newest is not None:
                try:
                    return orjson.loads(newest)
                except orjson.JSONDecodeError as error:
                    raise EngineProtocolError(f"an event is not JSON: {error}") from error
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
        """Give the connection back; one with unread data is closed, which the engine notices."""
        self._response.release()

    async def _read(self, timeout_s: float) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._response.content.readany()
        except TimeoutError as error:
            raise EngineUnavailable(f"no token within {timeout_s} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnavailable(f"stream broken: {type(error).__name__}: {error}") from error

    def _take_newest(self) -> bytes | None:
        end = self._buffer.rfind(_SEPARATOR)
        if end < 0:
            return None
        complete, self._buffer = self._buffer[:end], self._buffer[end + len(_SEPARATOR) :]
        newest = None
        for event in complete.split(_SEPARATOR):
            data = event.removeprefix(b"data:").strip()
            if data and data != _DONE:
                newest = data
        return newest
