"""A pass-through before a real engine that breaks chosen exchanges, as networks and servers do.

It parses bodies itself and uses none of the project's code. Only what samples, scores or votes is
broken; what an engine says of itself goes through.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import ClientSession, ClientTimeout, StreamReader, web

BROKEN_PATHS = ("/generate", "/v1/chat/completions")
Spoil = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to one exchange. Unset parts happen as the engine wants."""

    name: str
    hangs_up: bool = False
    """The connection is reset before anything is answered."""
    reply: tuple[int, str] | None = None
    """Status and text in place of the engine's reply."""
    delay_s: float = 0.0
    """How long the engine is not even asked."""
    cut_after: int | None = None
    """The connection is reset after so many bytes of the reply."""
    spoil: Spoil | None = None
    """Changes what the engine replied: each event of a stream, or the whole."""

    def __str__(self) -> str:
        return self.name


def _each_logprob(change: Callable[[list[Any]], None]) -> Spoil:
    def spoil(reply: dict[str, Any]) -> None:
        meta = reply.get("meta_info") or {}
        for name in ("output_token_logprobs", "input_token_logprobs"):
            if meta.get(name):
                change(meta[name])

    return spoil


def _last_is(value: float | None) -> Callable[[list[Any]], None]:
    def change(entries: list[Any]) -> None:
        entries[-1] = [value, *entries[-1][1:]]

    return change


def _one_less(entries: list[Any]) -> None:
    entries.pop()


HANGS_UP = Fault(name="hangs_up", hangs_up=True)
ERROR_500 = Fault(name="error_500", reply=(500, '{"error": {"message": "out of memory"}}'))
GARBAGE = Fault(name="garbage", reply=(200, "<html>It works!</html>"))
SLOW = Fault(name="slow", delay_s=1.0)
CUT = Fault(name="cut", cut_after=40)
CUT_LATER = Fault(name="cut_later", cut_after=1500)
NAN = Fault(name="nan", spoil=_each_logprob(_last_is(float("nan"))))
NULL = Fault(name="null", spoil=_each_logprob(_last_is(None)))
TOO_SHORT = Fault(name="too_short", spoil=_each_logprob(_one_less))


@dataclass
class FaultyWire:
    """Serves on a port of its own and forwards to `engine_url`; an async context manager.

    `faults` befall the next exchanges, in order; after them `always` does, if it is set.
    """

    engine_url: str
    faults: deque[Fault] = field(default_factory=deque)
    always: Fault | None = None
    happened: Counter[str] = field(default_factory=Counter)
    url: str = ""

    async def __aenter__(self) -> FaultyWire:
        self._session = ClientSession(timeout=ClientTimeout(total=120))
        app = web.Application(client_max_size=2**28)
        app.router.add_route("*", "/{path:.*}", self._forward)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await self.listen(0)
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()
        await self._runner.cleanup()

    async def listen(self, port: int | None = None) -> None:
        """Accept connections, on the port that clients know."""
        known = int(self.url.rpartition(":")[2]) if port is None else port
        self._site = web.TCPSite(self._runner, "127.0.0.1", known, reuse_address=True)
        await self._site.start()

    async def refuse(self) -> None:
        """Refuse connections until `listen`; those that are open are closed."""
        await self._site.stop()
        assert self._runner.server is not None
        for connection in self._runner.server.connections:
            connection.force_close()

    def _next_fault(self, path: str) -> Fault:
        if path not in BROKEN_PATHS:
            return Fault(name="none")
        fault = self.faults.popleft() if self.faults else self.always or Fault(name="none")
        self.happened[fault.name] += 1
        return fault

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        fault = self._next_fault(request.path)
        if fault.hangs_up:
            return self._reset(request)
        if fault.reply is not None:
            return web.Response(status=fault.reply[0], text=fault.reply[1])
        await asyncio.sleep(fault.delay_s)
        async with self._session.request(
            request.method,
            self.engine_url + request.path,
            data=body,
            headers={"Content-Type": "application/json"},
        ) as upstream:
            headers = {"Content-Type": upstream.content_type}
            response = web.StreamResponse(status=upstream.status, headers=headers)
            await response.prepare(request)
            sent = 0
            async for piece in _pieces(upstream.content, fault.spoil):
                await response.write(piece[: _left(fault, sent)])
                sent += len(piece)
                if fault.cut_after is not None and sent >= fault.cut_after:
                    return self._reset(request)
        await response.write_eof()
        return response

    def _reset(self, request: web.Request) -> web.Response:
        if request.transport is not None:
            request.transport.abort()
        return web.Response()


def _left(fault: Fault, sent: int) -> int | None:
    return None if fault.cut_after is None else max(fault.cut_after - sent, 0)


async def _pieces(content: StreamReader, spoil: Spoil | None) -> AsyncIterator[bytes]:
    """The reply as it comes, or whole and spoiled: events of a stream, or one line of JSON."""
    if spoil is None:
        async for piece in content.iter_any():
            yield piece
        return
    for line in (await content.read()).splitlines(keepends=True):
        yield _spoiled(line, spoil)


def _spoiled(line: bytes, spoil: Spoil) -> bytes:
    start = b"data: " if line.startswith(b"data:") else b""
    text = line.removeprefix(b"data:").strip()
    if not text.startswith(b"{"):
        return line
    reply = json.loads(text)
    spoil(reply)
    return start + json.dumps(reply).encode() + line[len(line.rstrip()) :]
