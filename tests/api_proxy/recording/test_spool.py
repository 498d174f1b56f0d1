"""A disk that is full, a database that is locked: the agent has its answers, nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from sqlalchemy import text

from api_proxy.app import ProxyDeps
from api_proxy.config import ProxyConfig
from records.config import StoreConfig
from records.names import TurnState
from records.spill.spill import waiting_files
from records.store import Store
from records.types import TurnRecord
from rollout_bridge.rendering.rendering import Rendering
from tests.api_proxy.conftest import Door, a_door
from tests.api_proxy.scripted_engine import ScriptedEngine
from tests.records.conftest import new_database
from tests.records.looking import list_turns
from tests.records.new_store import new_store

QUICK = {"record_timeout_s": 30.0, "spill_retry_s": 0.05}
USER = {"role": "user", "content": "How warm is it?"}
REPLY = {"role": "user", "content": "I wanted Celsius."}
THANKS = {"role": "user", "content": "Thanks."}


@asynccontextmanager
async def a_process(
    config: StoreConfig, rendering: Rendering, clock: Callable[[], float], **settings: Any
) -> AsyncIterator[Door]:
    """A proxy with a store of its own, as a process has it."""
    engine = ScriptedEngine()
    async with await Store.open(config, clock) as store:
        deps = ProxyDeps(
            store=store,
            engine=engine,
            rendering=rendering,
            config=ProxyConfig(**{**QUICK, **settings}),
            clock=clock,
        )
        async with a_door(deps, engine) as door:
            yield door


async def answered(door: Door, messages: list[dict], said: str) -> list[dict]:
    """One streamed request; the conversation with its answer."""
    door.will_say(said)
    response = await door.post(messages, stream=True)
    assert response.text.endswith("data: [DONE]\n\n")
    return [*messages, {"role": "assistant", "content": said}]


async def settled(door: Door) -> None:
    """Until nothing waits for the store."""
    async with asyncio.timeout(60):
        while door.app.state.service.spool.is_waiting:
            await asyncio.sleep(0.02)


async def metric(door: Door, line: str) -> bool:
    return line in (await door.client.get("/metrics")).text.splitlines()


async def readiness(door: Door) -> int:
    return (await door.client.get("/readyz")).status_code


async def conversation(store: Store) -> list[TurnRecord]:
    """All turns, oldest first."""
    refs = await list_turns(store)
    return sorted(
        await store.turns([ref.turn_id for ref in refs]), key=lambda turn: turn.created_at
    )


def check_linked(turns: list[TurnRecord]) -> None:
    """Three turns of one session: each the parent of the next, with its next state."""
    first, second, third = turns
    assert {turn.session_id for turn in turns} == {first.session_id}
    assert (second.parent_turn_id, third.parent_turn_id) == (first.turn_id, second.turn_id)
    assert (first.next_state, second.next_state) == ([REPLY], [THANKS])
    assert [turn.state for turn in turns] == [
        TurnState.JUDGING,
        TurnState.JUDGING,
        TurnState.AWAITING_NEXT_STATE,
    ]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Another program holds the write lock."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")


async def test_a_locked_database_delays_the_turns_and_loses_none(
    tmp_path: Path, rendering: Rendering, clock: Callable[[], float]
) -> None:
    path = tmp_path / "records.db"
    config = StoreConfig.sqlite(path, busy_timeout_s=0.5, lock_retries=0)
    async with a_process(config, rendering, clock) as door:
        history = await answered(door, [USER], "It is 70 F.")
        assert await readiness(door) == 200
        with locked(path):
            history = await answered(door, [*history, REPLY], "It is 21 C.")
            history = await answered(door, [*history, THANKS], "You are welcome.")
            assert len(await conversation(door.store)) == 1
            assert await readiness(door) == 503
            assert await metric(door, 'opd_store_spilled_total{what="turn"} 2.0')
        await settled(door)
        assert await readiness(door) == 200
        assert await metric(door, "opd_store_failed_turns_total 0.0")
        assert await metric(door, "opd_store_spill_waiting 0.0")
        turns = await conversation(door.store)
        check_linked(turns)
        # Afterwards everything goes its usual way again, with the prompt extended.
        await answered(door, [*history, USER], "Still 21 C.")
        fourth = (await conversation(door.store))[-1]
        assert fourth.parent_turn_id == turns[2].turn_id


@pytest.fixture
def postgresql_url() -> Iterator[str]:
    with new_database() as url:
        yield url


async def test_locked_tables_of_a_server_delay_the_turns_and_lose_none(
    postgresql_url: str, tmp_path: Path, rendering: Rendering, clock: Callable[[], float]
) -> None:
    config = StoreConfig(url=postgresql_url, spill_folder=tmp_path / "spill")
    async with a_process(config, rendering, clock, record_timeout_s=5.0) as door:
        history = await answered(door, [USER], "It is 70 F.")
        await settled(door)
        # Nothing can be read or written: the requests are linked when they are taken in.
        other = await asyncpg.connect(postgresql_url.replace("+asyncpg", ""))
        async with other.transaction():
            await other.execute("LOCK TABLE turns IN ACCESS EXCLUSIVE MODE")
            history = await answered(door, [*history, REPLY], "It is 21 C.")
            await answered(door, [*history, THANKS], "You are welcome.")
            assert await readiness(door) == 503
            assert await metric(door, 'opd_store_spilled_total{what="turn"} 2.0')
        await other.close()
        await settled(door)
        await door.app.state.service.recorder.drain()
        check_linked(await conversation(door.store))
        assert await metric(door, "opd_store_failed_turns_total 0.0")


async def fill(store: Store, pages: int | None) -> None:
    """Let the database file grow no further (None: as far as it likes)."""
    limit = text(f"PRAGMA max_page_count={pages or 1_000_000}")
    await store.writer.run(lambda connection: connection.execute(limit).all())


def spill_unreadable(door: Door, payload: bytes) -> None:
    """A record of another format in the file of this process."""
    spool = door.app.state.service.spool
    assert spool._file is not None
    spool._file.append(0.0, payload)
    spool._waiting.append(0.0)


async def answered_while_full(door: Door, unreadable: bytes | None = None) -> None:
    """A conversation of three turns. The last two find the database full, and between them stands
    a record of this content, if any.
    """
    history = await answered(door, [USER], "It is 70 F.")
    await fill(door.store, 1)
    history = await answered(door, [*history, REPLY], "It is 21 C. " * 500)
    if unreadable is not None:
        spill_unreadable(door, unreadable)
    await answered(door, [*history, THANKS], "You are welcome. " * 500)


async def test_a_full_database_spills_and_a_later_process_takes_it_in(
    tmp_path: Path, rendering: Rendering, clock: Callable[[], float]
) -> None:
    config = new_store(tmp_path / "records.db")
    async with a_process(config, rendering, clock) as door:
        await answered_while_full(door)
        assert await readiness(door) == 503
    assert len(waiting_files(config.spill_path)) == 1
    async with a_process(config, rendering, clock) as door:
        check_linked(await conversation(door.store))
        assert await readiness(door) == 200
        assert await metric(door, "opd_store_taken_in_total 2.0")
    assert list(config.spill_path.iterdir()) == []


async def test_what_was_taken_in_already_changes_nothing(
    tmp_path: Path, rendering: Rendering, clock: Callable[[], float]
) -> None:
    config = new_store(tmp_path / "records.db")
    async with a_process(config, rendering, clock) as door:
        await answered_while_full(door)
    (waiting,) = waiting_files(config.spill_path)
    kept = waiting.read_bytes()
    for _ in range(2):  # as if the process had died before it removed the file
        async with a_process(config, rendering, clock) as door:
            check_linked(await conversation(door.store))
        waiting.write_bytes(kept)


def kept_aside(config: StoreConfig) -> list[bytes]:
    """What the damaged files of a store hold."""
    return [path.read_bytes() for path in sorted(config.spill_path.glob("*.damaged"))]


async def test_a_record_that_cannot_be_read_is_counted_and_kept(
    tmp_path: Path, rendering: Rendering, clock: Callable[[], float]
) -> None:
    config = new_store(tmp_path / "records.db")
    async with a_process(config, rendering, clock) as door:
        await answered_while_full(door, unreadable=b'{"format": "of a newer program"}')
        # While the store refuses, the file is read again and again; that counts once.
        await asyncio.sleep(0.3)
        await fill(door.store, None)
        await settled(door)
        # The file is put aside after its last record was read.
        async with asyncio.timeout(60):
            while not await metric(door, "opd_store_spill_refused_total 1.0"):
                await asyncio.sleep(0.02)
        assert await metric(door, "opd_store_taken_in_total 2.0")
        [kept] = kept_aside(config)
        assert b"of a newer program" in kept
        # The file that takes its place does what it did.
        await fill(door.store, 1)
        await answered(door, [USER, THANKS], "You are welcome. " * 500)
        await fill(door.store, None)
        await settled(door)
        assert await metric(door, "opd_store_taken_in_total 3.0")
        assert await metric(door, "opd_store_spill_refused_total 1.0")
    assert len(kept_aside(config)) == 1


async def test_an_unreadable_record_of_a_dead_process_is_kept_and_those_around_it_taken_in(
    tmp_path: Path, rendering: Rendering, clock: Callable[[], float]
) -> None:
    config = new_store(tmp_path / "records.db")
    async with a_process(config, rendering, clock) as door:
        await answered_while_full(door, unreadable=b"no JSON")
    async with a_process(config, rendering, clock) as door:
        assert await metric(door, "opd_store_spill_refused_total 1.0")
        assert await metric(door, "opd_store_taken_in_total 2.0")
        assert len(await conversation(door.store)) == 3
        assert await readiness(door) == 200
    [kept] = kept_aside(config)
    assert b"no JSON" in kept


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


async def test_a_full_disk_leaves_the_reserved_room(
    small_disk: Path, rendering: Rendering, clock: Callable[[], float]
) -> None:
    config = StoreConfig.sqlite(small_disk / "records.db", spill_reserve_bytes=2**20)
    async with a_process(config, rendering, clock) as door:
        history = await answered(door, [USER], "It is 70 F.")
        ballast = small_disk / "ballast"
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        assert shutil.disk_usage(small_disk).free == 0
        history = await answered(door, [*history, REPLY], "It is 21 C. " * 500)
        history = await answered(door, [*history, THANKS], "You are welcome. " * 500)
        assert await readiness(door) == 503
        assert await metric(door, "opd_store_failed_turns_total 0.0")
        ballast.unlink()
        await settled(door)
        check_linked(await conversation(door.store))
