"""A text that the database refuses, or that cannot be read, keeps no other from being indexed. The
faults are in the database itself: triggers, and a row that nothing of this program writes.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from sqlalchemy import Connection, text

from records.errors import StoreUnavailable
from records.search.indexing import REFUSED_WORD, RefusalReason, RefusedText
from records.search.words import words_of
from records.store import Store
from tests.records.builders import a_session, a_turn
from tests.records.search.test_finding import asked, found, search

_SQLITE = """
CREATE TRIGGER refuses BEFORE INSERT ON turn_words_0_content WHEN {column} LIKE '%{word}%'
BEGIN SELECT RAISE(ABORT, 'no room for this one'); END
"""
_POSTGRESQL = (
    """
CREATE FUNCTION refuses() RETURNS trigger AS $$ BEGIN
IF NEW.words::text LIKE '%{word}%' THEN RAISE EXCEPTION 'no room for this one'; END IF;
RETURN NEW; END $$ LANGUAGE plpgsql
""",
    "CREATE TRIGGER refuses BEFORE INSERT ON turn_words FOR EACH ROW EXECUTE FUNCTION refuses()",
)
_TAKEN_AWAY = {
    "sqlite": ("DROP TRIGGER refuses",),
    "postgresql": ("DROP FUNCTION refuses CASCADE",),
}


def dialect(store: Store) -> str:
    return "postgresql" if store.config.sqlite_path is None else "sqlite"


async def execute(store: Store, *statements: str, **values: Any) -> None:
    def run(connection: Connection) -> None:
        for statement in statements:
            connection.execute(text(statement), values)

    await store.writer.run(run)


class Refusal:
    """From `begin` until `end`, the database refuses each text with `word`."""

    def __init__(self, store: Store) -> None:
        self._store, self._is_there = store, False

    async def begin(self, word: str) -> None:
        if dialect(self._store) == "sqlite":
            made = (_SQLITE.format(column="new.c0", word=word),)
        else:
            made = tuple(one.replace("{word}", word) for one in _POSTGRESQL)
        await execute(self._store, *made)
        self._is_there = True

    async def end(self) -> None:
        if self._is_there:
            await execute(self._store, *_TAKEN_AWAY[dialect(self._store)])
            self._is_there = False


@pytest.fixture
async def refusal(store: Store):
    """The tables are those of other tests too, so it is taken away."""
    one = Refusal(store)
    yield one
    await one.end()


async def test_a_text_that_the_database_refuses_is_left_out(
    store: Store, refusal: Refusal, caplog: pytest.LogCaptureFixture
) -> None:
    before = await asked(store, "celsius before")
    bad = await asked(store, "celsius poison")
    after = await asked(store, "celsius after")
    await refusal.begin("poison")
    said: list[RefusedText] = []
    assert await store.index_texts(10, said.append) == 3
    assert await store.index_texts(10, said.append) == 0
    [refused] = said
    assert (refused.turn_id, refused.reason) == (bad, RefusalReason.DATABASE)
    # FTS5 says no more than this of the error of its own table.
    says = {"sqlite": "constraint failed", "postgresql": "no room for this one"}
    assert says[dialect(store)] in refused.detail
    assert "celsius" not in refused.detail
    assert set(await found(store, "celsius")) == {before, after}
    page = await search(store, "celsius")
    assert (page.num_waiting, page.num_refused) == (0, 1)
    with caplog.at_level(logging.ERROR):
        await asked(store, "another poison")
        await store.index_texts(10)
    assert caplog.text.count("is not searched: its text cannot be indexed (database: ") == 1
    assert "another" not in caplog.text


async def test_a_text_that_cannot_be_read_is_left_out(store: Store) -> None:
    bad = await asked(store, "celsius of old")
    good = await asked(store, "celsius")
    turn = await store.turn(bad)
    assert turn is not None
    await execute(
        store,
        "UPDATE message_nodes SET body = :body WHERE CAST(body AS TEXT) LIKE '%of old%'",
        body=json.dumps({"content": "celsius"}),
    )
    said: list[RefusedText] = []
    assert await store.index_texts(10, said.append) == 2
    [refused] = said
    assert (refused.turn_id, refused.reason) == (bad, RefusalReason.UNREADABLE)
    assert refused.detail == "KeyError"
    assert await found(store, "celsius") == [good]


async def test_a_database_that_takes_no_text_refuses_none(store: Store, refusal: Refusal) -> None:
    turns = {await asked(store, "celsius one"), await asked(store, "celsius two")}
    await refusal.begin("scope")
    said: list[RefusedText] = []
    with pytest.raises(StoreUnavailable, match="not even a single word"):
        await store.index_texts(10, said.append)
    assert said == []
    page = await search(store, "celsius")
    assert (page.num_waiting, page.num_refused) == (2, 0)
    await refusal.end()
    assert await store.index_texts(10) == 2
    assert set(await found(store, "celsius")) == turns


async def test_a_full_disk_refuses_no_text(store: Store) -> None:
    if dialect(store) != "sqlite":
        pytest.skip("PostgreSQL's disk is everybody's")
    for number in range(50):
        await asked(store, " ".join(f"{number}x{i}" for i in range(2000)))

    def most_pages(connection: Connection, number: int | None = None) -> None:
        if number is None:
            number = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        connection.exec_driver_sql(f"PRAGMA max_page_count={number}")

    await store.write(most_pages)
    said: list[RefusedText] = []
    with pytest.raises(StoreUnavailable, match="full"):
        await store.index_texts(50, said.append)
    assert said == []
    await store.write(most_pages, 1_000_000)
    assert await store.index_texts(50, said.append) == 50
    assert said == []


async def test_refused_texts_are_counted_for_each_tenant_and_forgotten(
    store: Store, refusal: Refusal
) -> None:
    for scope, words in (("one", "poison"), ("two", "celsius")):
        said = [{"role": "user", "content": words}]
        await store.record_turn(a_turn(await a_session(store, scope), messages=said), scope=scope)
    await refusal.begin("poison")
    await store.index_texts(10)
    numbers = {
        scope: (await search(store, "celsius", scope=scope)).num_refused
        for scope in ("one", "two", None)
    }
    assert numbers == {"one": 1, "two": 0, None: 1}
    assert REFUSED_WORD not in words_of(f"{REFUSED_WORD} {REFUSED_WORD.upper()}").split()
