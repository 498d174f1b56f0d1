from __future__ import annotations

import asyncio
import threading

import pytest
from sqlalchemy import Connection, text

from records.config import StoreConfig
from records.errors import StoreUnavailable
from records.store import Store


def one(connection: Connection) -> int:
    return connection.execute(text("SELECT 1")).scalar_one()


async def test_a_closed_store_refuses_reads(config: StoreConfig) -> None:
    store = await Store.open(config)
    assert await store.read(one) == 1
    await store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        await store.read(one)


async def test_as_many_reads_at_once_as_connections(config: StoreConfig) -> None:
    async with await Store.open(config.model_copy(update={"reader_connections": 3})) as store:
        assert await asyncio.gather(*(store.read(one) for _ in range(20))) == [1] * 20


async def test_a_store_closes_after_a_read_whose_caller_left(sqlite_config: StoreConfig) -> None:
    entered, leave = threading.Event(), threading.Event()
    ended = []

    def slow(connection: Connection) -> None:
        entered.set()
        leave.wait(10)
        ended.append(one(connection))

    store = await Store.open(sqlite_config)
    reading = asyncio.create_task(store.read(slow))
    await asyncio.to_thread(entered.wait, 10)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert not ended
    closing = asyncio.create_task(store.close())
    await asyncio.sleep(0.05)
    assert not closing.done()
    leave.set()
    await closing
    assert ended == [1]


def test_a_program_ends_while_a_read_is_cancelled(sqlite_config: StoreConfig) -> None:
    async def program(num_turns: int) -> None:
        store = await Store.open(sqlite_config)
        reading = asyncio.create_task(store.counts())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        reading.cancel()
        await store.close()

    # `asyncio.run` waits for every task that is left: one that hangs would hang it for ever.
    for num_turns in range(40):
        asyncio.run(program(num_turns))
