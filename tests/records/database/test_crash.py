"""A writing process is killed; what it acknowledged is there, and nothing is half there."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest
from sqlalchemy import func, select, text

from records.config import StoreConfig
from records.names import TurnState
from records.store import Store
from records.tables.models import TokensRow, TurnRow
from tests.records.builders import claimed

PROGRAM = """
import asyncio, sys
from records.config import StoreConfig
from records.store import Store
from tests.records.builders import REPLY, SCOPE, a_session, a_turn

async def write(store):
    while True:
        turn = a_turn(await a_session(store))
        await store.record_turn(turn, scope=SCOPE)
        await store.set_next_state(turn.turn_id, [REPLY])
        print(turn.turn_id, flush=True)

async def main():
    async with await Store.open(StoreConfig(url=sys.argv[1])) as store:
        await asyncio.gather(*(write(store) for _ in range(8)))

asyncio.run(main())
"""


@pytest.mark.timeout(120)
async def test_a_killed_writer_loses_nothing_that_it_acknowledged(config: StoreConfig) -> None:
    acknowledged: list[str] = []
    for _ in range(3):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PROGRAM, config.url, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        for _ in range(40):
            line = (await process.stdout.readline()).decode().strip()
            assert line, "the writing process ended by itself"
            acknowledged.append(line)
        os.kill(process.pid, signal.SIGKILL)
        rest = (await process.stdout.read()).decode().split("\n")
        acknowledged += [line.strip() for line in rest if len(line.strip()) == 32]
        await process.wait()

    async with await Store.open(config) as store:
        turns = await store.turns(acknowledged)
        assert {turn.state for turn in turns} == {TurnState.JUDGING}
        whole = await store.read(
            lambda connection: [
                connection.execute(select(func.count()).select_from(table)).scalar_one()
                for table in (TurnRow, TokensRow)
            ]
        )
        assert whole[0] == whole[1] >= len(acknowledged)
        if config.is_sqlite:
            check = text("PRAGMA integrity_check")
            assert await store.read(lambda connection: connection.scalar(check)) == "ok"
        assert len(await claimed(store, TurnState.JUDGING, limit=20)) == 20
