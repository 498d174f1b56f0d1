"""Recorded sessions that share a transaction are stored as they would be one at a time."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from sqlalchemy import Connection, select

from records.config import StoreConfig
from records.reading.replaying import ImportedSession, PreparedSession, import_op
from records.store import Store
from records.tables.models import Base, TurnTextRow
from records.tables.totals import totals
from records.turns.turn_writes import NextState, prepare
from records.types import CapturedTurn
from tests.records.builders import REPLY, SCOPE, a_turn, following
from tests.records.conftest import Clock

NOW = 1_000_000.0


def a_session(name: str, *turns: CapturedTurn) -> PreparedSession:
    """All turns but the last have a next state."""
    return PreparedSession(
        session_id=f"rec_{name}",
        scope=SCOPE,
        name=name,
        now=NOW,
        turns=tuple(prepare(turn, scope=SCOPE, now=NOW + at) for at, turn in enumerate(turns)),
        next_states=tuple(
            NextState(turn_id=turn.turn_id, messages=[REPLY], now=NOW) for turn in turns[:-1]
        ),
    )


def sessions() -> list[PreparedSession]:
    """A path, a fork, and two recordings of one session whose turns stand at other places."""
    path = a_turn("rec_path", turn_id="path-1")
    path_2 = following(path, turn_id="path-2")
    first = a_turn("rec_fork", turn_id="fork-1")
    long = following(first, turn_id="fork-2")
    longer = following(long, turn_id="fork-3")
    other = {"role": "user", "content": "In kelvin, please."}
    edited = following(first, other, turn_id="fork-4")
    last = following(edited, turn_id="fork-5")
    return [
        a_session("path", path, path_2, following(path_2, turn_id="path-3")),
        a_session("fork", first, long, longer, edited),
        a_session("fork", first, edited, last),
        a_session("fork", first, edited),
    ]


def rows(connection: Connection) -> dict[str, list[str]]:
    """Everything that is stored, as text and in one order; not the numbers of texts, which are
    their order itself. Totals are added up.
    """
    stored = {
        table.name: sorted(repr(tuple(row)) for row in connection.execute(select(*columns)))
        for table in Base.metadata.sorted_tables
        for columns in [[one for one in table.columns if one is not TurnTextRow.__table__.c.number]]
    }
    return stored | {"totals": sorted(map(repr, totals(connection).items()))}


async def test_a_group_is_stored_as_its_sessions_one_by_one(
    store: Store, tmp_path: Path, clock: Clock
) -> None:
    added = await store.writer.run(lambda connection: import_op(connection, sessions()))
    assert [one.num_new for one in added] == [3, 4, 1, 0]
    async with await Store.open(StoreConfig.sqlite(tmp_path / "single.db"), clock) as single:
        one_by_one = [await single.import_session(session) for session in sessions()]
        assert one_by_one == added
        expected = await single.writer.run(rows)
    found = await store.writer.run(rows)
    assert {name for name, stored in expected.items() if stored} >= {"turns", "message_nodes"}
    assert found == expected


async def test_a_second_import_adds_nothing(store: Store) -> None:
    await store.writer.run(lambda connection: import_op(connection, sessions()))
    before = await store.writer.run(rows)
    again = await store.writer.run(lambda connection: import_op(connection, sessions()))
    assert [one.num_new for one in again] == [0, 0, 0, 0]
    assert await store.writer.run(rows) == before


async def test_what_is_missing_behind_stored_turns_is_added(store: Store) -> None:
    whole = sessions()[1]
    start = replace(whole, turns=whole.turns[:2], next_states=whole.next_states[:2])
    assert (await store.import_session(start)).num_new == 2
    assert (await store.import_session(whole)).num_new == 2


async def test_a_session_that_cannot_be_taken_in_fails_alone(store: Store) -> None:
    good, other = sessions()[:2]
    orphan = replace(other, turns=other.turns[1:])
    outcomes = await asyncio.gather(
        store.import_session(good), store.import_session(orphan), return_exceptions=True
    )
    assert outcomes[0] == ImportedSession(num_new=3)
    assert isinstance(outcomes[1], ValueError)
    assert "is not stored" in str(outcomes[1])
