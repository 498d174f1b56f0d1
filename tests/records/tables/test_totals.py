"""Totals are exact at every moment, whoever writes, and whatever becomes of the writing."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import sys
from contextlib import closing

import asyncpg
import pytest
from sqlalchemy import Connection, text

from records.care.housekeeping import Housekeeping
from records.care.verify import verify_database
from records.config import StoreConfig
from records.names import DropReason, TurnState
from records.store import Store
from records.tables.totals import totals
from tests.records.builders import (
    OWNER,
    REPLY,
    a_score,
    a_session,
    a_verdict,
    claimed,
    recorded,
    turn_in,
)
from tests.records.conftest import Clock

WRITERS = 4
TURNS = 12


async def state_numbers(store: Store) -> dict[TurnState, int]:
    """Number of turns in each state that has any."""
    return {state: number for state, number in (await store.counts()).items() if number}


async def write_some(config: StoreConfig, owner: str) -> None:
    """Turns of a process of its own, as far as a score; some are dropped."""
    async with await Store.open(config) as store:
        turn_ids = await asyncio.gather(*(recorded(store) for _ in range(TURNS)))
        await asyncio.gather(*(store.set_next_state(one, [REPLY]) for one in turn_ids))
        for turn_id in await claimed(store, TurnState.JUDGING, owner, TURNS):
            dropped = turn_id[-1] in "01234567"
            verdict = a_verdict(turn_id, None if dropped else "be brief")
            await store.commit_verdict(owner, verdict, DropReason.NO_HINT if dropped else None)
        for turn_id in await claimed(store, TurnState.SCORING, owner, TURNS):
            await store.commit_scores(owner, [a_score(turn_id)])


async def test_every_moment_of_concurrent_writing_adds_up(config: StoreConfig) -> None:
    async with await Store.open(config) as store:
        if not config.is_sqlite:  # so that rows are put together meanwhile
            near = text("SELECT setval('totals_number', 450)")
            await store.writer.run(lambda connection: connection.execute(near))
        writing = asyncio.gather(*(write_some(config, f"owner-{one}") for one in range(WRITERS)))
        looks = 0
        while not writing.done():
            assert await verify_database(config) == []
            looks += 1
        await writing
        assert looks > 1
        assert await verify_database(config) == []
        assert sum((await store.counts()).values()) == WRITERS * TURNS
        rows = await store.read(lambda c: c.scalar(text("SELECT count(*) FROM totals")))
        assert rows is not None
        if config.is_sqlite:
            assert rows < 20
        else:
            number = await store.read(lambda c: c.scalar(text("SELECT max(number) FROM totals")))
            assert number is not None
            assert number > 512
            assert rows < 2 * (number - 512) + 20


async def test_a_transaction_that_is_undone_counts_nothing(store: Store) -> None:
    await turn_in(store, TurnState.READY)
    before = await store.read(totals)

    def change_and_fail(connection: Connection) -> None:
        connection.execute(text("UPDATE turns SET state = 'dropped', drop_reason = 'stale'"))
        connection.execute(text("DELETE FROM votes"))
        raise ValueError("undo this")

    failing, kept = await asyncio.gather(
        store.writer.run(change_and_fail), recorded(store), return_exceptions=True
    )
    assert isinstance(failing, ValueError)
    assert isinstance(kept, str)
    assert await state_numbers(store) == {TurnState.READY: 1, TurnState.AWAITING_NEXT_STATE: 1}
    after = await store.read(totals)
    del after["turn:awaiting_next_state::0"]
    assert after == before
    assert await verify_database(store.config) == []


async def test_what_is_deleted_no_longer_counts(store: Store, clock: Clock) -> None:
    await turn_in(store, TurnState.TRAINED)
    session_id = await a_session(store)
    for _ in range(2):
        await recorded(store, session_id=session_id, drop_reason=DropReason.ABORTED)
    await turn_in(store, TurnState.READY)
    keeper = Housekeeping(store, clock)
    assert (await keeper.delete([session_id], "forget", patience_s=0.0)).num_turns == 2
    assert await store.drops() == {}
    assert await state_numbers(store) == {TurnState.TRAINED: 1, TurnState.READY: 1}
    assert (await store.vote_summary()).votes_pos == 6
    assert await verify_database(store.config) == []
    clock.now += 100 * 86_400.0
    assert (await keeper.expire(30.0)).num_turns == 2
    assert await state_numbers(store) == {}
    assert (await store.vote_summary()).votes_pos == 0
    assert await store.mean_score_latency() is None
    assert await verify_database(store.config) == []


async def test_a_connection_that_ends_before_its_commit_counts_nothing(store: Store) -> None:
    await turn_in(store, TurnState.READY)
    change = "UPDATE turns SET state = 'dropped', drop_reason = 'stale'"
    path = store.config.sqlite_path
    if path is not None:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            assert connection.execute(change).rowcount == 1
    else:
        connection = await asyncpg.connect(store.config.url.replace("+asyncpg", ""))
        await connection.execute("BEGIN")
        assert await connection.execute(change) == "UPDATE 1"
        end = text(f"SELECT pg_terminate_backend({connection.get_server_pid()}, 5000)")
        assert await store.read(lambda c: c.scalar(end))
    assert await state_numbers(store) == {TurnState.READY: 1}
    assert await verify_database(store.config) == []
    await recorded(store)
    assert await verify_database(store.config) == []


async def test_a_killed_writer_counts_what_it_committed(store: Store) -> None:
    program = (
        "import asyncio, sys\n"
        "from records.config import StoreConfig\n"
        "from records.store import Store\n"
        "from tests.records.builders import recorded\n"
        "async def main():\n"
        "    store = await Store.open(StoreConfig(url=sys.argv[1]))\n"
        "    while True:\n"
        "        await recorded(store)\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, store.config.url, env=dict(os.environ)
    )
    async with asyncio.timeout(60):
        while sum((await store.counts()).values()) < 5:
            await asyncio.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    await process.wait()
    assert await verify_database(store.config) == []
    await recorded(store)
    assert await verify_database(store.config) == []


@pytest.mark.parametrize("config", ["postgresql"], indirect=True)
async def test_no_writer_waits_for_another_nor_for_one_that_puts_rows_together(
    store: Store,
) -> None:
    await turn_in(store, TurnState.READY)
    connection = await asyncpg.connect(store.config.url.replace("+asyncpg", ""))
    transaction = connection.transaction()
    await transaction.start()
    await connection.execute("UPDATE turns SET state = 'dropped', drop_reason = 'stale'")
    await connection.execute("SELECT fold_totals()")
    async with asyncio.timeout(10), await Store.open(store.config) as other:
        await recorded(other)
        await recorded(store)
        await other.writer.run(lambda c: c.execute(text("SELECT fold_totals()")))
        assert await verify_database(store.config) == []
    await transaction.commit()
    await connection.close()
    assert await store.drops() == {DropReason.STALE: 1}
    await store.writer.run(lambda c: c.execute(text("SELECT fold_totals()")))
    problems = await verify_database(store.config)
    assert not any("total" in one for one in problems), problems
    rows = await store.read(lambda c: c.execute(text("SELECT name FROM totals")).scalars().all())
    assert len(rows) == len(set(rows))


async def test_a_turn_that_waits_for_a_hint_alone_is_counted_when_let_go(store: Store) -> None:
    turn_id = await turn_in(store, TurnState.JUDGING)
    await store.release(OWNER, [turn_id])
    let_go = "UPDATE turns SET priority = 2, state = 'dropped', drop_reason = 'over_capacity'"
    await store.writer.run(lambda connection: connection.execute(text(let_go)))
    assert await store.judged_share() == 0.0
    back = "UPDATE turns SET priority = 0, state = 'dropped', drop_reason = 'stale'"
    await store.writer.run(lambda connection: connection.execute(text(back)))
    assert await store.judged_share() is None
