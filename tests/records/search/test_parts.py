"""SQLite's index of texts in parts: found, taken out, moved by the migration; and what it costs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, event, text

from records.care.deletion import delete_sessions_op
from records.care.housekeeping import Housekeeping
from records.config import StoreConfig
from records.database.schema import HEAD
from records.search import parts
from records.store import Store
from records.types import PolicyVersion
from tests.records.builders import ANSWER, SCOPE, a_session, a_turn, a_version, following
from tests.records.conftest import Clock
from tests.records.database.test_migrations import move
from tests.records.search.test_finding import asked, found

SYSTEM = {"role": "system", "content": "You help."}


class Steps:
    """Counts what SQLite's machine does, in steps: no clock is read."""

    def __init__(self) -> None:
        self.number = 0

    def listen(self, connection: Any, _record: Any) -> None:
        connection.set_progress_handler(self._count, 1)

    def _count(self) -> None:
        self.number += 1

    async def of(self, work: Callable[[], Awaitable[Any]]) -> int:
        """Steps of one call."""
        before = self.number
        await work()
        return self.number - before


@pytest.fixture
def steps() -> Iterator[Steps]:
    counter = Steps()
    event.listen(Engine, "connect", counter.listen)
    yield counter
    event.remove(Engine, "connect", counter.listen)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_NUMBERS", 16)


async def conversation(store: Store) -> str:
    """A session of two turns that follows the system prompt of all; its id."""
    session_id = await a_session(store)
    words = " ".join(f"{session_id}{number}" for number in range(100))
    user = {"role": "user", "content": f"celsius {words}"}
    first = a_turn(session_id, messages=[SYSTEM, user])
    # The same question again, with an answer that differs in a form of its own.
    again = a_turn(
        session_id,
        messages=[SYSTEM, user],
        response={**ANSWER, "reasoning_content": f"think of {session_id}"},
    )
    for turn in (first, following(first), again):
        await store.record_turn(turn, scope=SCOPE)
    await store.index_texts(10)
    return session_id


async def test_no_operation_costs_more_in_a_larger_store(
    steps: Steps, sqlite_config: StoreConfig, clock: Clock
) -> None:
    async with await Store.open(sqlite_config, clock) as store:
        keeper = Housekeeping(store, clock)

        async def forget() -> None:
            await keeper.delete([sessions[-3]], "forget", patience_s=0.0)

        async def lookup() -> None:
            await store.turns_by_fingerprint(SCOPE, "unknown", 0.0, 8)
            await store.recent_summaries(SCOPE, ["x"], 0.0, 8)

        work = {
            "forget": forget,
            "converse": lambda: conversation(store),
            "lookup": lookup,
        }
        cost: list[dict[str, int]] = []
        for size in (24, 192):
            sessions = [await conversation(store) for _ in range(size)]
            cost.append({name: await steps.of(one) for name, one in work.items()})
    few, many = cost
    assert min(few.values()) > 0
    assert {name: many[name] for name in many if many[name] > 1.25 * few[name]} == {}, cost


async def test_a_start_looks_at_no_more_of_a_longer_chain(
    steps: Steps, sqlite_config: StoreConfig, clock: Clock
) -> None:
    async with await Store.open(sqlite_config, clock) as store:
        read: set[int] = set()

        class Chain(list[tuple[PolicyVersion, list[str]]]):
            def __iter__(self) -> Any:
                for at in range(len(self)):
                    yield self[at]

            def __getitem__(self, at: Any) -> Any:
                if isinstance(at, int):
                    read.add(at % len(self))
                return super().__getitem__(at)

        chain = Chain((a_version(number), []) for number in range(1, 2001))
        await store.reconcile(chain)
        read.clear()
        cost = await steps.of(lambda: store.reconcile(chain))
        assert len(read) < 30
        assert cost < 1000


async def test_a_search_goes_on_from_part_to_part(sqlite_config: StoreConfig, clock: Clock) -> None:
    async with await Store.open(sqlite_config, clock) as store:
        turns = [await asked(store, f"celsius {number}") for number in range(40)]
        assert await store.index_texts(50) == 40
        assert await store.read(parts.parts) == [2, 1, 0]
        assert await found(store, "celsius", limit=50) == turns[::-1]
        assert await found(store, "celsius", limit=50, after=20) == turns[18::-1]
        assert await found(store, "39") == [turns[39]]
        assert await found(store, "3") == [turns[3]]


async def test_what_a_dead_process_began_to_forget_is_taken_out_by_the_next(
    sqlite_config: StoreConfig, clock: Clock
) -> None:
    async with await Store.open(sqlite_config, clock) as store:
        turns = [await asked(store, f"celsius {number}") for number in range(40)]
        secret = await asked(store, "qqsecret celsius")
        await store.index_texts(50)
        assert await found(store, "qqsecret") == [secret]
        # All of the second part, and one of the third.
        gone = [one.session_id for one in await store.turns([*turns[15:31], secret])]
        await store.write(delete_sessions_op, session_ids=gone, reason="forget", now=clock())
        assert await found(store, "qqsecret") == []
        assert await store.read(parts.has_deleted)
        assert b"qqsecret" in await pages_of(store, 2)
        await Housekeeping(store, clock).finish_deletions()
        assert not await store.read(parts.has_deleted)
        assert await store.read(parts.parts) == [2, 0]
        assert b"qqsecret" not in await pages_of(store, 2)
        path = sqlite_config.sqlite_path
        assert path is not None
        assert all(b"qqsecret" not in one.read_bytes() for one in path.parent.iterdir())
        assert await found(store, "celsius", limit=50) == [*turns[:30:-1], *turns[14::-1]]


async def pages_of(store: Store, part: int) -> bytes:
    """The words of a part as FTS5 keeps them, also those that only deleted rows have."""
    pages = text(f"SELECT block FROM turn_words_{part}_data")
    return b"".join(await store.read(lambda connection: list(connection.scalars(pages))))


async def test_the_index_of_an_earlier_program_is_moved(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    turn_id = await asked(store, "celsius")
    await store.index_texts(10)
    await store.writer.run(lambda connection: move(connection, "0028", down=True))
    await store.writer.run(lambda connection: move(connection, HEAD))
    assert await found(store, "celsius") == [turn_id]
    new = await asked(store, "celsius")
    await store.index_texts(10)
    assert await found(store, "celsius") == [new, turn_id]
