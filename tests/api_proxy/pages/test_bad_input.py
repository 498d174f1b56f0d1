"""What pages do about records that are too large, gone, incomplete or damaged, and a store that
is locked or has another schema: they say so in words, soon, and go on. On both databases.
"""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager
from pathlib import Path

import asyncpg
import numpy as np
import pytest
from sqlalchemy import Connection, delete, insert, select, text, update
from sqlalchemy.engine import make_url

from api_proxy.pages import now
from api_proxy.routes import hints_api
from records.care.housekeeping import Housekeeping
from records.config import RedactionConfig, StoreConfig
from records.database.database import readers, write_transactions
from records.database.schema import HEAD
from records.database.writer import GroupWriter
from records.store import Store
from records.tables.models import Base, SampleRow, ScoreRow, TokensRow, TurnRow
from tests.api_proxy.conftest import Clock, Door
from tests.api_proxy.pages.test_sessions import LIST, begun
from tests.api_proxy.pages.test_turns import PATH, trained
from tests.records.builders import USER, a_session, a_turn
from tests.records.conftest import SERVER, empty, new_database
from tests.records.new_store import new_store

MOST_LAG_S = 0.3
"""The event loop may be kept from going on for this long at a time, in CPU seconds of the process:
other processes do not count.
"""


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    """A database of this file's own: a test changes its settings."""
    with new_database() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreConfig]:
    plain = {"secrets": "off", "personal": "off", "max_chars": 20_000_000}
    if request.param == "sqlite":
        found = new_store(tmp_path / "records.db")
    else:
        url = request.getfixturevalue("server_url")
        found = StoreConfig(url=url, spill_folder=tmp_path / "spill")
    yield found.model_copy(update={"redaction": RedactionConfig.model_validate(plain)})
    if not found.is_sqlite:
        empty(found.url)


@pytest.fixture
async def store(config: StoreConfig, clock: Clock) -> AsyncIterator[Store]:
    async with await Store.open(config, clock) as opened:
        yield opened


@asynccontextmanager
async def without_lag() -> AsyncIterator[None]:
    """The event loop goes on meanwhile."""
    # As `serve` does: a collection looks at what came since, not at all that earlier tests left.
    gc.collect()
    gc.freeze()
    longest, is_over = 0.0, False

    async def watch() -> None:
        nonlocal longest
        while not is_over:
            began = time.process_time()
            await asyncio.sleep(0.01)
            longest = max(longest, time.process_time() - began)

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0.02)
    try:
        yield
    finally:
        is_over = True
        await watching
    assert longest < MOST_LAG_S


async def test_ten_megabytes_in_a_message_are_cut(door: Door, store: Store) -> None:
    large = "word " * 2_000_000  # 10 MB
    function = {"name": "f", "arguments": "x" * 14_000}
    call = {"id": "1", "type": "function", "function": function}
    session_id = await a_session(store, "anonymous")
    turn = a_turn(
        session_id,
        messages=[USER, {"role": "assistant", "content": large, "tool_calls": [call]}, USER],
        prompt_ids=np.full(2_000_000, 5, dtype=np.int32),
    )
    await store.record_turn(turn, scope="anonymous")
    for path in (f"/ui/sessions/{session_id}", f"/ui/turns/{turn.turn_id}"):
        async with without_lag():
            page = await door.client.get(path)
        assert page.status_code == 200
        assert len(page.text) < 200_000
        assert "10006000 more characters are not shown" in page.text, "the text and the arguments"
    assert "1992000 tokens before this are not shown" in page.text


async def test_a_session_of_five_thousand_turns_comes_in_parts(door: Door, store: Store) -> None:
    session_id = await begun(store, "again and again")

    def multiply(connection: Connection) -> None:
        [row] = connection.execute(select(TurnRow.__table__)).mappings()
        rows = [
            {**row, "turn_id": f"{number:05}", "created_at": row["created_at"] + number}
            for number in range(1, 5000)
        ]
        connection.execute(insert(TurnRow), rows)

    await store.writer.run(multiply)
    async with without_lag():
        page = await door.client.get(f"/ui/sessions/{session_id}")
        listed = (await door.client.get("/ui/sessions")).text
    assert page.text.count("<article") == 50
    assert "Later turns" in page.text
    assert "200 newest" in listed
    last = await door.client.get(f"{LIST}/{session_id}", params={"after": "04998", "limit": 100})
    assert [one["turn_id"] for one in last.json()["turns"]] == ["04999"]
    assert (await door.client.get("/ui/turns/04999")).status_code == 500, "it has no tokens"


async def test_a_session_that_is_deleted_while_its_page_is_open(door: Door, store: Store) -> None:
    turn_id = await trained(door)
    session_id = (await door.turn(turn_id)).session_id
    own = [f"/ui/sessions/{session_id}", f"/ui/turns/{turn_id}"]
    for path in own:
        assert (await door.client.get(path)).status_code == 200
    await Housekeeping(store, time.time).delete([session_id], "forget", patience_s=0)
    following = f"/ui/sessions/{session_id}?after={turn_id}&limit=50"
    for path in [*own, following, f"{LIST}/{session_id}", f"{PATH}/{turn_id}"]:
        gone = await door.client.get(path)
        assert gone.status_code == 404
        assert "It may have been deleted." in gone.text
    assert (await door.client.post(f"{PATH}/{turn_id}/teacher")).status_code == 404
    for path in ("/ui/now", "/ui/sessions", "/ui/memory", "/ui/review"):
        page = await door.client.get(path)
        assert page.status_code == 200
        assert turn_id not in page.text


async def test_numbers_that_are_missing_are_not_known(door: Door, store: Store) -> None:
    turn_id = await trained(door)
    nothing = np.zeros(0, dtype=np.float32)

    def take_away(connection: Connection) -> None:
        connection.execute(update(SampleRow).values(advantages=nothing))
        connection.execute(update(ScoreRow).values(teacher_logprobs=nothing))

    await store.writer.run(take_away)
    tokens = (await door.client.get(f"{PATH}/{turn_id}")).json()["tokens"]
    for name in ("advantage", "teacher", "gap"):
        assert tokens["signals"][name] == [None] * 3
    page = (await door.client.get(f"/ui/turns/{turn_id}")).text
    assert "None of the tokens has this number." in page
    assert page.count('<span class="t no" title="Token') == 3, "no token is left out"


@pytest.mark.parametrize("damage", ["no tokens", "other tokens"])
async def test_a_turn_with_missing_tokens_is_said_to_be_damaged(
    door: Door, store: Store, damage: str
) -> None:
    turn_id = await trained(door)
    session_id = (await door.turn(turn_id)).session_id
    other = np.array([1], dtype=np.int32)
    statement = (
        delete(TokensRow) if damage == "no tokens" else update(TokensRow).values(prompt_ids=other)
    )
    await store.writer.run(lambda connection: connection.execute(statement))
    page = await door.client.get(f"/ui/turns/{turn_id}")
    assert page.status_code == 500
    assert "is incomplete or damaged" in page.text
    assert turn_id in page.text
    assert "try again" not in page.text, "it would not help"
    reply = (await door.client.get(f"{PATH}/{turn_id}")).json()
    assert reply["error"]["code"] == "record_damaged"
    # The conversation is shown without them.
    assert (await door.client.get(f"/ui/sessions/{session_id}")).status_code == 200


@contextmanager
def without_foreign_keys(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path)) as connection:
        yield connection
        connection.commit()


@pytest.mark.parametrize("config", ["sqlite"], indirect=True)
async def test_a_turn_whose_messages_are_gone_is_counted(door: Door, store: Store) -> None:
    session_id = await begun(store, "gone")
    assert store.config.sqlite_path is not None
    with without_foreign_keys(store.config.sqlite_path) as connection:
        connection.execute("DELETE FROM message_nodes")
    page = await door.client.get(f"/ui/sessions/{session_id}")
    assert page.status_code == 200
    assert "1 turns are not shown: their messages are not stored" in page.text
    assert (await door.client.get(f"{LIST}/{session_id}")).json()["not_shown"] == 1


async def lock_sqlite(store: Store, path: Path, stack: AsyncExitStack) -> None:
    # In WAL mode, nobody can be kept out who has opened the file already.
    await store.readers.close()
    await store.writer.close()
    connection = stack.enter_context(
        closing(sqlite3.connect(path, isolation_level=None, timeout=1))
    )
    connection.execute("PRAGMA locking_mode=EXCLUSIVE")
    connection.execute("BEGIN EXCLUSIVE")
    store.readers = readers(store.config)
    store.writer = GroupWriter(write_transactions(store.config), group_max=1, lock_retries=1)
    store.writer.start()


async def lock_postgresql(url: str, limit: str, stack: AsyncExitStack) -> None:
    """`limit`: how long the server lets others wait for a lock."""
    name = make_url(url).database
    connection = await asyncpg.connect(f"postgresql://{SERVER}/{name}", timeout=3)
    stack.push_async_callback(connection.close)
    await connection.execute(f"ALTER DATABASE {name} SET lock_timeout = '{limit}'")
    await stack.enter_async_context(connection.transaction())
    tables = ", ".join(Base.metadata.tables)
    await connection.execute(f"LOCK TABLE {tables} IN ACCESS EXCLUSIVE MODE")


@asynccontextmanager
async def locked(store: Store, limit: str) -> AsyncIterator[None]:
    """Another connection keeps everybody else out of all tables."""
    async with AsyncExitStack() as stack:
        if (path := store.config.sqlite_path) is not None:
            await lock_sqlite(store, path, stack)
        else:
            await store.readers.close()
            store.readers = readers(store.config)
            await lock_postgresql(store.config.url, limit, stack)
        yield


@pytest.mark.parametrize(
    ("config", "limit", "patience_s", "says"),
    [
        ("sqlite", "", 0.3, "another program may hold its lock"),
        ("postgresql", "0", 0.3, "another program may hold its lock"),
        ("postgresql", "10ms", hints_api.READ_S, "The store does not answer at the moment"),
    ],
    indirect=["config"],
)
async def test_a_store_that_is_locked_is_said_soon(
    door: Door,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    patience_s: float,
    says: str,
) -> None:
    turn_id = await trained(door)
    [hint] = await store.hints(limit=1)
    session_id = (await door.turn(turn_id)).session_id
    paths = [
        *("/ui/sessions", f"/ui/sessions/{session_id}", f"/ui/turns/{turn_id}", "/ui/memory"),
        *(f"/ui/memory/{hint.hint_id}", "/ui/review", "/ui/sessions?text=warm"),
    ]
    assert (await door.client.get("/ui/now")).status_code == 200
    door.app.state.now = now.NowFeed(door.app.state.service)
    usual_s = hints_api.READ_S
    monkeypatch.setattr(hints_api, "READ_S", patience_s)
    async with locked(store, limit), without_lag():
        began = time.monotonic()
        pages = await asyncio.gather(
            *(door.client.get(path) for path in paths),
            # Ten tabs wait for one reading.
            *(door.client.get("/ui/now") for _ in range(10)),
        )
        assert time.monotonic() - began < 8 * patience_s
        for page in pages:
            assert page.status_code == 503
            assert says in page.text
            assert "<h1>Not shown</h1>" in page.text
        monkeypatch.setattr(hints_api, "READ_S", 0.3)
        unsure = await door.client.delete(f"/v1/hints/{hint.hint_id}")
        assert unsure.status_code == 503
        assert "The change may have been made or not" in unsure.text
        assert (await door.client.get("/health")).status_code == 200
    monkeypatch.setattr(hints_api, "READ_S", usual_s)
    door.app.state.now = now.NowFeed(door.app.state.service)
    for path in ["/ui/now", *paths]:
        assert (await door.client.get(path)).status_code in (200, 404), "it goes on"


@pytest.mark.parametrize(
    ("revision", "says"),
    [
        ("0020", f"older than &#39;{HEAD}&#39;, which this program needs: a migration is pending"),
        ("9999", "written by a newer version; update the program"),
    ],
)
async def test_another_schema_is_said(door: Door, store: Store, revision: str, says: str) -> None:
    turn_id = await trained(door)
    session_id = (await door.turn(turn_id)).session_id

    def change(connection: Connection) -> None:
        # As a backup from before a migration, or a newer program, leaves it.
        connection.execute(text("ALTER TABLE turns RENAME COLUMN times_left TO other"))
        connection.execute(text("UPDATE alembic_version SET version_num = :to"), {"to": revision})

    def change_back(connection: Connection) -> None:
        connection.execute(text("ALTER TABLE turns RENAME COLUMN other TO times_left"))
        connection.execute(text("UPDATE alembic_version SET version_num = :to"), {"to": HEAD})

    await store.writer.run(change)
    try:
        for path in (f"/ui/sessions/{session_id}", f"/ui/turns/{turn_id}"):
            page = await door.client.get(path)
            assert page.status_code == 503
            assert says in page.text
    finally:
        await store.writer.run(change_back)
    assert (await door.client.get(f"/ui/turns/{turn_id}")).status_code == 200
