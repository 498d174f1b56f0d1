"""Who reads an answer slowly gets it; who reads none of it is closed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn
from starlette.responses import Response

from api_proxy.config import ProxyConfig
from api_proxy.metrics import ProxyMetrics
from api_proxy.server.connections import protocol_of

NUM_BYTES = 8 * 2**20
TIMEOUT_S = 1.0


@asynccontextmanager
async def long_answers() -> AsyncIterator[int]:
    """The port of a server whose every answer is long."""
    config = uvicorn.Config(
        Response(bytes(NUM_BYTES)),
        loop="uvloop",
        http=protocol_of(ProxyConfig(write_timeout_s=TIMEOUT_S), ProxyMetrics().refusals),
        lifespan="off",
        log_config=None,
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        # Accepted connections take it over: what waits, waits in the server.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        yield listener.getsockname()[1]
        server.should_exit = True
        await serving


async def num_read(port: int, pause_s: float) -> int:
    """Bytes of an answer that a client gets that rests between two pieces."""
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        sock.setblocking(False)
        await loop.sock_connect(sock, ("127.0.0.1", port))
        await loop.sock_sendall(sock, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        number = 0
        try:
            while True:
                await asyncio.sleep(pause_s)
                for _ in range(8):
                    piece = await loop.sock_recv(sock, 65_536)
                    if not piece:
                        return number
                    number += len(piece)
        except ConnectionResetError:
            return number


@pytest.mark.parametrize(("pause_s", "is_whole"), [(0.2, True), (4 * TIMEOUT_S, False)])
async def test_an_answer_that_is_read_slowly_is_not_cut_off(pause_s: float, is_whole: bool) -> None:
    async with long_answers() as port:
        assert (await num_read(port, pause_s) >= NUM_BYTES) is is_whole
