"""Search in the texts of turns, on SQLite's FTS5 and PostgreSQL's tsvector."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from records.care.housekeeping import Housekeeping
from records.names import TurnState
from records.reading.browsing import Wanted
from records.search import finding, indexing
from records.search.finding import FoundPage
from records.search.words import phrases_of
from records.store import Store
from tests.records.builders import ANSWER, SCOPE, a_session, a_turn, following, recorded
from tests.records.conftest import Clock


async def search(store: Store, query: str, **changes: Any) -> FoundPage:
    values = {"scope": None, "wanted": Wanted(), "after": None, "limit": 10} | changes
    return await store.found_page(values.pop("scope"), phrases=phrases_of(query), **values)


async def found(store: Store, query: str, **changes: Any) -> list[str]:
    return [one.turn_id for one in (await search(store, query, **changes)).sessions]


async def asked(store: Store, words: str, **changes: Any) -> str:
    return await recorded(store, messages=[{"role": "user", "content": words}], **changes)


async def test_a_turn_is_found_by_what_it_adds(store: Store) -> None:
    system = {"role": "system", "content": "Instructions nobody searches."}
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    session_id = await a_session(store)
    first = a_turn(
        session_id,
        messages=[system, {"role": "user", "content": "How warm is Köln?"}],
        response={"role": "assistant", "content": None, "tool_calls": [call]},
    )
    second = following(first, {"role": "tool", "tool_call_id": "1", "content": "70 Fahrenheit"})
    for one in (first, second):
        await store.record_turn(one, scope=SCOPE)
    assert (await search(store, "warm")).num_waiting == 2
    assert await store.index_texts(10) == 2
    assert await store.index_texts(10) == 0
    assert await found(store, "KÖLN") == [first.turn_id]
    assert await found(store, "get_weather") == [first.turn_id]
    assert await found(store, "fahrenheit 70") == [second.turn_id]
    assert await found(store, '"70 F"') == [second.turn_id]  # its answer: It is 70 F.
    assert await found(store, "warm fahrenheit") == []
    assert await found(store, "instructions") == []
    page = await search(store, '"is köln"')
    assert page.num_waiting == 0
    assert page.sessions[0].session.session_id == session_id
    assert page.sessions[0].excerpt is not None
    assert page.sessions[0].excerpt.found == "is Köln"


async def test_no_query_is_a_command(store: Store) -> None:
    queries = (
        '"',
        "a'b",
        "a:b",
        "{x}",
        "^a",
        "a NEAR(b)",
        "NOT",
        "a* -b",
        ":query",
        "% \\",
        "\x00a",
    )
    session_id = await a_session(store)
    for query in queries:
        await asked(store, f"it says {query} and more", session_id=session_id)
    await store.index_texts(20)
    for query in queries:
        if phrases_of(query):
            page = await search(store, query)
            assert page.sessions[0].excerpt is not None, query


async def test_a_page_goes_on_where_the_last_one_ended(store: Store) -> None:
    turns = [await asked(store, f"celsius {number}") for number in range(5)]
    await store.index_texts(10)
    seen: list[str] = []
    after: int | None = None
    for size in (2, 2, 1):
        page = await search(store, "celsius", limit=2, after=after)
        assert len(page.sessions) == size
        seen += [one.turn_id for one in page.sessions]
        after = page.next
    assert after is None
    assert seen == turns[::-1]


async def test_a_session_is_listed_once_on_a_page(store: Store) -> None:
    session_id = await a_session(store)
    older = await asked(store, "celsius", session_id=session_id)
    newer = await asked(store, "celsius again", session_id=session_id)
    await store.index_texts(10)
    assert await found(store, "celsius") == [newer]
    assert older != newer


async def test_filters_are_about_the_turn_with_the_text(store: Store) -> None:
    session_id = await a_session(store)
    await asked(store, "celsius", session_id=session_id)
    await asked(store, "other", session_id=session_id)
    await store.index_texts(10)
    wanted = Wanted(state=TurnState.AWAITING_NEXT_STATE)
    assert len(await found(store, "celsius", wanted=wanted)) == 1
    assert await found(store, "celsius", wanted=Wanted(state=TurnState.TRAINED)) == []
    assert await found(store, "celsius", wanted=Wanted(version=7)) == []
    assert await found(store, "celsius", wanted=Wanted(until=1.0)) == []


async def test_a_tenant_learns_nothing_of_others(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = await asked(store, "celsius")
    monkeypatch.setattr(finding, "MOST_MATCHES", 1)
    other = await a_session(store, "other")
    for _ in range(3):
        await store.record_turn(
            a_turn(other, messages=[{"role": "user", "content": "celsius secret"}]), scope="other"
        )
    await store.index_texts(2)
    assert (await search(store, "celsius", scope="third")).num_waiting == 0
    await store.index_texts(10)
    assert await found(store, "celsius", scope=SCOPE) == [mine]
    nothing = await search(store, "secret", scope=SCOPE)
    assert nothing == FoundPage(
        sessions=(), num_examined=0, num_waiting=0, num_refused=0, next=None
    )


async def test_what_is_forgotten_is_not_found_and_not_kept(
    store: Store, clock: Clock, tmp_path: Path
) -> None:
    turns = [await asked(store, f"celsius zanzibar{number}") for number in range(60)]
    waiting = await asked(store, "celsius zanzibarwaits")
    assert await store.index_texts(30) == 30
    assert await store.index_texts(30) == 30
    keeper = Housekeeping(store, clock)
    turn = await store.turn(turns[7])
    last = await store.turn(waiting)
    assert turn is not None
    assert last is not None
    await keeper.delete([turn.session_id, last.session_id], "forget", patience_s=0.0)
    assert await store.index_texts(100) == 0
    assert await found(store, "zanzibar7") == []
    assert await found(store, "zanzibar8") == [turns[8]]
    if store.config.is_sqlite:
        stored = b"".join(one.read_bytes() for one in sorted(tmp_path.glob("records.db*")))
        assert b"zanzibar7 " not in stored
        assert b"zanzibarwaits" not in stored
        assert b"zanzibar59" in stored
        terms = await _terms(store)
        assert "zanzibar8" in terms
        assert "zanzibar7" not in terms


async def _terms(store: Store) -> Sequence[str]:
    """All words of SQLite's index, also those that only deleted rows have."""

    def read(connection: Any) -> Sequence[str]:
        connection.execute(
            text("CREATE VIRTUAL TABLE temp.terms USING fts5vocab(main, turn_words_0, row)")
        )
        return connection.scalars(text("SELECT term FROM temp.terms")).all()

    return await store.writer.run(read)


async def test_a_turn_that_is_deleted_while_it_is_read_is_not_indexed(
    store: Store, clock: Clock
) -> None:
    gone = await store.turn(await asked(store, "celsius zanzibar"))
    assert gone is not None
    read = await store.read(indexing.waiting_texts, limit=10)
    await Housekeeping(store, clock).delete([gone.session_id], "forget", patience_s=0.0)
    new = await asked(store, "kelvin")  # with SQLite it has the same number
    assert await store.write(indexing.index_op, texts=read) == 0
    assert await store.index_texts(10) == 1
    assert await found(store, "zanzibar") == []
    assert await found(store, "kelvin") == [new]


async def test_the_longest_texts_are_indexed(store: Store) -> None:
    """All words different, of characters that take the most bytes, more of them than are read."""
    words = " ".join(
        f"{chr(0x10400 + n % 40)}{chr(0x10400 + n // 40 % 40)}{n}" for n in range(40_000)
    )
    turn_id = await asked(store, f"celsius {words}")
    assert await store.index_texts(10) == 1
    assert await store.index_texts(10) == 0
    assert await found(store, "celsius") == [turn_id]


async def test_two_processes_index_each_turn_once(store: Store) -> None:
    for number in range(20):
        await asked(store, f"celsius {number}")
    async with await Store.open(store.config) as second:
        await asyncio.gather(*(one.index_texts(20) for one in (store, second) * 2))
    assert len(await found(store, "celsius", limit=100)) == 20


async def test_each_turn_is_indexed_in_its_own_form(store: Store, clock: Clock) -> None:
    """A message that two turns share is stored once, in the form that came first."""
    parts = [{"type": "text", "text": "celsius"}, {"type": "image_url", "image_url": {"url": "x"}}]
    first = await recorded(store, messages=[{"role": "user", "content": parts}])
    second = await recorded(store, messages=[{"role": "user", "content": "celsius"}])
    gone = await store.turn(first)
    assert gone is not None
    await Housekeeping(store, clock).delete([gone.session_id], "forget", patience_s=0.0)
    await store.index_texts(10)
    assert await found(store, "celsius") == [second]
    assert await found(store, ANSWER["content"]) == [second]
