"""Connections of a shared socket: each worker gets its part, one that ends takes what is left."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from api_proxy.server.accepting import Acceptor
from api_proxy.server.listening import listening_sockets
from api_proxy.sharing.sharing import Sharing


@dataclass
class Worker:
    acceptor: Acceptor
    served: list[socket.socket] = field(default_factory=list)


@contextlib.asynccontextmanager
async def two_workers() -> AsyncIterator[tuple[Worker, Worker, int]]:
    """Both on one socket; its port."""
    [listener] = listening_sockets("127.0.0.1", 0)
    made = Sharing.create(2)
    with contextlib.ExitStack() as stack:
        workers = []
        for number in (1, 2):
            sharing = Sharing.join(made.descriptor, number, 2)
            served: list[socket.socket] = []

            async def serve(one: socket.socket, served: list[socket.socket] = served) -> None:
                served.append(stack.enter_context(one))

            own = stack.enter_context(listener.dup())
            acceptor = Acceptor([own], serve, served.__len__, sharing)
            stack.callback(acceptor.close)
            sharing.set_answering(True)
            workers.append(Worker(acceptor, served))
        first, second = workers
        with listener:
            yield first, second, listener.getsockname()[1]


async def connect(stack: contextlib.ExitStack, port: int, number: int) -> None:
    for _ in range(number):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        stack.callback(writer.close)
        await asyncio.sleep(0.01)


async def until_all(workers: tuple[Worker, Worker], number: int) -> None:
    async with asyncio.timeout(20):
        while sum(len(one.served) for one in workers) < number:
            await asyncio.sleep(0.01)


async def test_each_worker_gets_its_part() -> None:
    async with two_workers() as (first, second, port):
        with contextlib.ExitStack() as stack:
            await connect(stack, port, 20)
            await until_all((first, second), 20)
            assert (len(first.served), len(second.served)) == (10, 10)


async def test_one_that_ends_leaves_them_to_the_other_and_takes_them_if_nobody_else_does() -> None:
    async with two_workers() as (first, second, port):
        with contextlib.ExitStack() as stack:
            first.acceptor.leave_all()
            await connect(stack, port, 6)
            await until_all((first, second), 6)
            assert (len(first.served), len(second.served)) == (0, 6)
            second.acceptor.close()
            await connect(stack, port, 2)
            await until_all((first, second), 8)
            assert len(first.served) == 2
