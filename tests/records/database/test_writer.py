from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import Connection, func, insert, select

from records.config import StoreConfig
from records.database.locking import FairFileLock
from records.errors import StoreConflict, StoreUnavailable
from records.names import TurnState
from records.store import Store
from records.tables.models import ToolsetRow
from tests.records.builders import (
    ANSWER,
    OWNER,
    REPLY,
    SCOPE,
    a_score,
    a_session,
    a_turn,
    a_verdict,
    claimed,
    recorded,
)
from tests.records.looking import verdict_of


def add(connection: Connection, name: str) -> str:
    connection.execute(insert(ToolsetRow), {"toolset_hash": name, "body": name})
    return name


def add_then_fail(connection: Connection, name: str) -> None:
    add(connection, name)
    raise ValueError(f"refused {name}")


async def names(store: Store) -> set[str]:
    return await store.read(
        lambda connection: set(connection.scalars(select(ToolsetRow.toolset_hash)))
    )


@pytest.fixture
async def impatient(sqlite_config: StoreConfig) -> AsyncIterator[Store]:
    config = sqlite_config.model_copy(update={"busy_timeout_s": 0.05, "lock_retries": 1})
    async with await Store.open(config) as store:
        yield store


async def test_operations_that_wait_share_a_transaction(store: Store) -> None:
    before = store.writer.num_groups
    done = await asyncio.gather(
        *(store.writer.run(lambda c, n=str(n): add(c, n)) for n in range(100))
    )
    assert done == [str(number) for number in range(100)]
    assert store.writer.num_groups - before <= 2
    assert len(await names(store)) == 100


async def test_a_failing_operation_fails_only_its_caller(store: Store) -> None:
    outcomes = await asyncio.gather(
        store.writer.run(lambda c: add(c, "a")),
        store.writer.run(lambda c: add_then_fail(c, "b")),
        store.writer.run(lambda c: add(c, "a")),
        store.writer.run(lambda c: add(c, "c")),
        return_exceptions=True,
    )
    assert outcomes[0] == "a"
    assert isinstance(outcomes[1], ValueError)
    assert isinstance(outcomes[2], Exception)
    assert outcomes[3] == "c"
    assert await names(store) == {"a", "c"}


async def test_on_a_full_disk_nobody_of_a_group_is_told_that_it_was_written(
    impatient: Store,
) -> None:
    """SQLite undoes the whole transaction then, with what was written before it was full."""

    def most_pages(connection: Connection, more: int) -> None:
        number = connection.exec_driver_sql("PRAGMA page_count").scalar_one() + more
        connection.exec_driver_sql(f"PRAGMA max_page_count={number}")

    await impatient.writer.run(lambda c: most_pages(c, 2))
    outcomes = await asyncio.gather(
        impatient.writer.run(lambda c: add(c, "small")),
        impatient.writer.run(lambda c: add(c, "large" * 100_000)),
        return_exceptions=True,
    )
    assert await names(impatient) == set()
    for one in outcomes:
        assert isinstance(one, StoreUnavailable)
        assert "disk is full" in str(one)
    await impatient.writer.run(lambda c: most_pages(c, 1_000))
    assert await impatient.writer.run(lambda c: add(c, "small")) == "small"


async def test_a_caller_that_left_before_its_turn_writes_nothing(impatient: Store) -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow(connection: Connection) -> None:
        entered.set()
        leave.wait(10)

    first = asyncio.create_task(impatient.writer.run(slow))
    await asyncio.to_thread(entered.wait, 10)
    waiting = asyncio.create_task(impatient.writer.run(lambda c: add(c, "gone")))
    await asyncio.sleep(0)
    waiting.cancel()
    leave.set()
    await first
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await names(impatient) == set()


async def test_closing_commits_what_waits_and_refuses_the_rest(config: StoreConfig) -> None:
    store = await Store.open(config)
    writes = [
        asyncio.create_task(store.writer.run(lambda c, n=str(n): add(c, n))) for n in range(20)
    ]
    await asyncio.sleep(0)
    await store.close()
    assert [await write for write in writes] == [str(number) for number in range(20)]
    with pytest.raises(StoreUnavailable, match="closed"):
        await store.writer.run(lambda c: add(c, "late"))
    async with await Store.open(config) as again:
        assert len(await names(again)) == 20


async def test_a_locked_database_is_unavailable_and_then_works_again(impatient: Store) -> None:
    session_id = await a_session(impatient)
    turn = a_turn(session_id)
    path = impatient.config.sqlite_path
    assert path is not None
    foreign = sqlite3.connect(path, isolation_level=None)
    foreign.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable, match="database is locked"):
        await impatient.record_turn(turn, scope="key")
    assert await impatient.turn(turn.turn_id) is None
    assert impatient.writer.num_retries == 1
    foreign.execute("COMMIT")
    foreign.close()
    await impatient.record_turn(turn, scope="key")
    assert await impatient.turn(turn.turn_id) is not None


async def test_a_lock_shorter_than_the_patience_costs_nothing(impatient: Store) -> None:
    path = impatient.config.sqlite_path
    assert path is not None
    foreign = sqlite3.connect(path, isolation_level=None)
    foreign.execute("BEGIN IMMEDIATE")
    writing = asyncio.create_task(recorded(impatient))
    await asyncio.sleep(0.02)
    foreign.execute("COMMIT")
    foreign.close()
    assert await impatient.turn(await writing) is not None


async def test_a_writer_that_holds_the_door_too_long_is_reported(impatient: Store) -> None:
    path = impatient.config.sqlite_path
    assert path is not None
    lock = FairFileLock(path, 1.0)
    with lock.held(), pytest.raises(StoreUnavailable, match="another process is writing"):
        await recorded(impatient)
    lock.close()
    assert await recorded(impatient)


def test_who_waits_comes_before_who_just_held_the_lock(tmp_path: Path) -> None:
    holder, waiter = (FairFileLock(tmp_path / "db", 10.0) for _ in range(2))
    order: list[str] = []

    def wait() -> None:
        with waiter.held():
            order.append("waiter")

    thread = threading.Thread(target=wait)
    with holder.held():
        thread.start()
        while _free(tmp_path / "db-door"):
            pass
    with holder.held():
        order.append("holder")
    thread.join()
    assert order == ["waiter", "holder"]
    holder.close()
    waiter.close()


def _free(path: Path) -> bool:
    import fcntl

    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


async def test_writes_are_durable_and_in_wal_mode(sqlite_config: StoreConfig) -> None:
    async with await Store.open(sqlite_config) as store:
        pragmas = await store.writer.run(
            lambda connection: [
                connection.exec_driver_sql(f"PRAGMA {name}").scalar()
                for name in ("journal_mode", "synchronous", "foreign_keys")
            ]
        )
        assert pragmas == ["wal", 2, 1]
        with pytest.raises(StoreUnavailable, match="readonly"):
            await store.read(lambda connection: add(connection, "x"))


async def test_reads_see_what_was_committed_before_them(store: Store) -> None:
    for number in range(20):
        await store.writer.run(lambda c, n=str(number): add(c, n))
        count = await store.read(lambda c: c.scalar(select(func.count(ToolsetRow.toolset_hash))))
        assert count == number + 1


async def test_turns_of_one_group_keep_their_own_forms_and_errors(store: Store) -> None:
    """All these wait together: they share nodes, one repeats another, some are wrong."""
    session_id = await a_session(store)
    first = a_turn(session_id, response={**ANSWER, "reasoning_content": "first"})
    second = a_turn(session_id, response={**ANSWER, "reasoning_content": "second"})
    wrong_scope = a_turn(await a_session(store, scope="other"))
    orphan = a_turn(session_id, token_parent_id="nobody", num_shared_ids=2)
    changed = replace(first, response_ids=np.array([1, 1, 1], dtype=np.int32))
    # Until the redactor is ready, turns are redacted on threads and may overtake one another.
    turns = [
        await store.redacted_turn(turn, SCOPE)
        for turn in (first, second, wrong_scope, first, orphan, changed)
    ]
    outcomes = await asyncio.gather(
        *(store.record_turn(turn, scope=SCOPE) for turn in turns), return_exceptions=True
    )
    kinds = [type(outcome) for outcome in outcomes]
    assert kinds == [type(None)] * 2 + [ValueError, type(None), ValueError, StoreConflict]
    for turn in (first, second):
        record = await store.turn(turn.turn_id)
        assert record is not None
        assert record.response == turn.response
    assert sum((await store.counts()).values()) == 2


async def test_of_two_next_states_in_one_group_the_first_counts(store: Store) -> None:
    turn_ids = [await recorded(store) for _ in range(3)]
    wanted = [*turn_ids, turn_ids[1], "nobody"]
    outcomes = await asyncio.gather(
        *(
            store.set_next_state(one, [{"role": "user", "content": str(n)}])
            for n, one in enumerate(wanted)
        )
    )
    # They are redacted on threads, so either of the two may come first.
    first, second = (3, 1) if outcomes[3] else (1, 3)
    assert [outcomes[place] for place in (0, first, 2, second, 4)] == [
        True,
        True,
        True,
        False,
        False,
    ]
    turns = await store.turns(turn_ids)
    assert [turn.next_state[0]["content"] for turn in turns] == ["0", str(first), "2"]


async def test_of_two_verdicts_in_one_group_the_first_counts(store: Store) -> None:
    turn_ids = [await recorded(store) for _ in range(3)]
    for turn_id in turn_ids:
        await store.set_next_state(turn_id, [REPLY])
    assert sorted(await claimed(store, TurnState.JUDGING)) == sorted(turn_ids)
    verdicts = [a_verdict(turn_id, f"hint of {turn_id}") for turn_id in turn_ids]
    lost = store.commit_verdict("stranger", verdicts[2], None)
    again = store.commit_verdict(OWNER, a_verdict(turn_ids[0], "another hint"), None)
    commits = [store.commit_verdict(OWNER, verdict, None) for verdict in verdicts[:2]]
    assert await asyncio.gather(*commits, again, lost) == [True, True, False, False]
    stored = [await verdict_of(store, turn_id) for turn_id in turn_ids]
    assert stored == [*verdicts[:2], None]
    scoring = await claimed(store, TurnState.SCORING)
    assert sorted(scoring) == sorted(turn_ids[:2])
    wanted = [a_score(one, hint=f"hint of {one}") for one in [*scoring, scoring[0]]]
    scores = [store.commit_scores(OWNER, [score]) for score in wanted]
    # They are packed apart, so either of two scores of one turn may be the first.
    first, other, again_first = await asyncio.gather(*scores)
    assert (other, {first, again_first}) == (True, {True, False})
    assert await store.ready_count() == 2
