"""Limits on a connection: time to send its headers, time to read its answers, bytes of headers.

uvicorn limits none of these. Here, a connection that is silent, sends its headers too slowly, or
reads nothing of what it is sent is closed, and their number is limited. Bodies are read, and timed
out, by `admission`.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from api_proxy.config import ProxyConfig
from api_proxy.server.refusals import Refusals

logger = logging.getLogger(__name__)

_MAX_HEADERS = 256
_LEAST_READ = 65_536
"""Bytes that a client reads within the write timeout if it reads at all, so that a long answer on a
slow line is not cut off.
"""
_OTHER_FILES = 256
"""Open files that are not connections of clients."""
_HEADERS_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s"
)
_TOO_LARGE_BODY = (
    b'{"error":{"message":"The request line and headers are too long.",'
    b'"type":"invalid_request_error","param":null,"code":"headers_too_large"}}'
)


def protocol_of(config: ProxyConfig, refusals: Refusals) -> type[HttpToolsProtocol]:
    """The protocol of connections with these limits; uvicorn makes one for each connection."""
    max_connections = room_for(config.max_connections, raised_file_limit())

    class LimitedProtocol(BoundedProtocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.bounds = config
            self.refusals = refusals
            self.max_connections = max_connections

    return LimitedProtocol


def raised_file_limit() -> int:
    """How many files this process may open, after asking for as many as it can have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            # Some systems have a limit of their own below the one that they report.
            return soft
    return hard if hard != resource.RLIM_INFINITY else 2**31


def room_for(num_wanted: int, file_limit: int) -> int:
    """How many connections there may be: as many as wanted, or as the limit on files allows, which
    is logged. At least half of all files, and at least one, are left for them.
    """
    room = max(file_limit - _OTHER_FILES, file_limit // 2, 1)
    if room < num_wanted:
        logger.warning(
            "at most %d connections at once instead of %d (proxy.max_connections): this process "
            "may open %d files; raise its hard limit (`ulimit -Hn`, LimitNOFILE of systemd)",
            room,
            num_wanted,
            file_limit,
        )
    return min(num_wanted, room)


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol of HTTP/1.1, bounded in time and size."""

    bounds: ProxyConfig
    refusals: Refusals
    max_connections: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._num_header_bytes = 0
        self._is_in_headers = True
        self._is_whole = True
        """Whether all of the newest request has come."""
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected: it has a while to send something."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._end("connections", abort=True)
            return
        self._await_headers(self.timeout_keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers."""
        self._stop_timer("_reading")
        self._stop_timer("_writing")
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came, unless there is too much of it before the request begins."""
        if self._is_refused:
            return
        if self._is_in_headers:
            if not self._num_header_bytes:
                self._await_headers(self.bounds.header_timeout_s)
            self._num_header_bytes += len(data)
            # What follows the headers in this piece counts only if they have no end in it.
            if self._num_header_bytes > self.bounds.max_header_bytes and b"\r\n\r\n" not in data:
                self._refuse()
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        self._is_whole = False
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Begin to answer, unless the headers are too long."""
        self._is_in_headers = False
        self._num_header_bytes = 0
        self._stop_timer("_reading")
        length = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if length > self.bounds.max_header_bytes or len(self.headers) > _MAX_HEADERS:
            self._refuse()
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Keep nothing of a refused request."""
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The next bytes belong to another request."""
        self._is_in_headers = True
        self._is_whole = True
        if not self._is_refused:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """An answered request that is still arriving has as long as headers have."""
        super().on_response_complete()
        if not self._is_whole and not self.transport.is_closing():
            self._await_headers(self.bounds.header_timeout_s)

    def pause_writing(self) -> None:
        """The client does not read: it has a while to continue."""
        super().pause_writing()
        self._await_reading()

    def resume_writing(self) -> None:
        """It reads again."""
        super().resume_writing()
        self._stop_timer("_writing")

    def _await_reading(self) -> None:
        self._stop_timer("_writing")
        waiting = self.transport.get_write_buffer_size()
        self._writing = self.loop.call_later(
            self.bounds.write_timeout_s, self._check_reading, waiting
        )

    def _check_reading(self, num_waited: int) -> None:
        """Nothing is written meanwhile, so what waits can only shrink."""
        if self.transport.get_write_buffer_size() > num_waited - _LEAST_READ:
            self._end("write_timeout", abort=True)
        else:
            self._await_reading()

    def _await_headers(self, timeout_s: float) -> None:
        self._stop_timer("_reading")
        self._reading = self.loop.call_later(timeout_s, self._end, "header_timeout", False)

    def _stop_timer(self, name: str) -> None:
        timer: asyncio.TimerHandle | None = getattr(self, name)
        if timer is not None:
            timer.cancel()
            setattr(self, name, None)

    def _refuse(self) -> None:
        self._is_refused = True
        self._stop_timer("_reading")
        self.refusals.note("headers")
        self.transport.write(_HEADERS_TOO_LARGE % (len(_TOO_LARGE_BODY), _TOO_LARGE_BODY))
        self.transport.close()

    def _end(self, limit: str, abort: bool) -> None:
        """Close the connection. `abort`: what waits to be sent is discarded."""
        if self.transport.is_closing() and not abort:
            return
        if limit != "header_timeout" or self._num_header_bytes or not self._is_whole:
            self.refusals.note(limit)
        if abort:
            self.transport.abort()
        else:
            self.transport.close()
