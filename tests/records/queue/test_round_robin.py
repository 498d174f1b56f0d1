"""Judging, scoring and training take turns scope by scope; what that costs does not grow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Connection, Text, cast, event, func, insert, literal, select, update

from records.names import TurnState
from records.queue import waiting as queues
from records.queue.round_robin import deal
from records.store import Store
from records.tables.models import TokensRow, TurnRow
from records.tables.sql import table_of
from records.training import training
from records.training.share import UNCAPPED, Share
from tests.records.builders import TRAINER, recorded
from tests.records.conftest import Clock

JUDGING, SCORING, READY = TurnState.JUDGING, TurnState.SCORING, TurnState.READY


def copies(connection: Connection, like: str, scope: str, state: TurnState, count: int) -> None:
    """`count` more turns like one that is recorded, in this scope and state; older ones first."""
    table = table_of(TurnRow)
    numbers = select(literal(0).label("n")).cte("numbers", recursive=True)
    numbers = numbers.union_all(select(numbers.c.n + 1).where(numbers.c.n < count - 1))
    first = connection.scalar(select(func.count()).select_from(TurnRow)) or 0
    changed: dict[str, Any] = {
        "turn_id": literal(f"{scope}-") + func.substr(cast(numbers.c.n + 10**6, Text), 2),
        "scope": literal(scope),
        "state": literal(state, table.c.state.type),
        "created_at": numbers.c.n + 0.001 + first,
        "updated_at": literal(0.0),
        "claim_owner": literal(None),
        "claim_until": literal(None),
    }
    columns = [changed.get(column.name, column) for column in table.columns]
    rows = select(*columns).select_from(table.join(numbers, literal(True)))
    rows = rows.where(table.c.turn_id == like)
    connection.execute(insert(table).from_select([column.name for column in table.columns], rows))
    tokens = table_of(TokensRow)
    columns = [changed.get(column.name, column) for column in tokens.columns]
    rows = select(*columns).select_from(tokens.join(numbers, literal(True)))
    rows = rows.where(tokens.c.turn_id == like)
    connection.execute(insert(tokens).from_select([column.name for column in tokens.columns], rows))


async def waiting(store: Store, state: TurnState, **numbers: int) -> None:
    """As many turns of each scope in `state`; of the first scope all are older than of the next."""
    like = await recorded(store)
    for scope, count in numbers.items():
        await store.write(copies, like, scope, state, count)


async def taken(store: Store, state: TurnState, limit: int, owner: str = "a") -> list[str]:
    """Scopes of the turns that a claim gives, in its order; each scope's own order is checked."""
    turns = await store.claim(state, owner=owner, limit=limit, ttl_s=60.0)
    return [turn.turn_id.partition("-")[0] for turn in turns]


async def leased(store: Store, count: int, share: Share) -> Counter[str]:
    taken = await store.write(
        training.lease_op, owner=TRAINER, count=count, now=store._clock(), ttl_s=60.0, share=share
    )
    return Counter(turn_id.partition("-")[0] for turn_id in taken.turn_ids)


@pytest.mark.parametrize("state", [JUDGING, SCORING])
async def test_the_few_turns_of_one_tenant_are_among_the_first(
    store: Store, state: TurnState
) -> None:
    await waiting(store, state, many=1000, few=3)
    assert sorted(await taken(store, state, 6)) == ["few"] * 3 + ["many"] * 3
    assert await taken(store, state, 8) == ["many"] * 8


async def test_one_turn_at_a_time_goes_round_too(store: Store) -> None:
    await waiting(store, JUDGING, a=50, b=2, c=2)
    order = [(await taken(store, JUDGING, 1))[0] for _ in range(8)]
    assert order == ["a", "b", "c", "a", "b", "c", "a", "a"]


async def test_more_scopes_than_places_all_get_their_turn(store: Store) -> None:
    names = {f"s{number:02d}": 3 for number in range(20)}
    await waiting(store, JUDGING, **names)
    first = [scope for _ in range(5) for scope in await taken(store, JUDGING, 4)]
    assert sorted(first) == sorted(names)


@pytest.mark.parametrize("state", [JUDGING, SCORING])
async def test_of_a_scope_the_newest_go_first(store: Store, state: TurnState) -> None:
    await waiting(store, state, a=9, b=9)
    turns = await store.claim(state, owner="a", limit=10, ttl_s=60.0)
    for scope in "ab":
        numbers = [turn.turn_id for turn in turns if turn.turn_id.startswith(scope)]
        assert numbers == [f"{scope}-{number:06d}" for number in range(8, 3, -1)]


async def test_several_workers_take_each_turn_once(store: Store, config) -> None:
    await waiting(store, JUDGING, a=30, b=4)
    async with await Store.open(config, Clock()) as other:
        found: list[str] = []
        for _ in range(6):
            for worker, owner in ((store, "one"), (other, "two")):
                turns = await worker.claim(JUDGING, owner=owner, limit=4, ttl_s=60.0)
                found += [turn.turn_id for turn in turns]
    assert len(found) == len(set(found)) == 34
    assert sum(turn_id.startswith("b") for turn_id in found[:8]) == 4


async def test_a_batch_holds_at_most_the_share_of_one_scope(store: Store) -> None:
    await waiting(store, READY, many=1000, some=40, few=21)
    for _ in range(3):
        batch = await leased(store, 16, Share(most=0.4, wait_s=1e9))
        assert batch.total() == 16
        assert max(batch.values()) <= 6


async def test_a_batch_that_is_short_waits_for_others_and_not_for_ever(store: Store) -> None:
    await waiting(store, READY, many=1000, few=3)
    now = store._clock()
    share = Share(most=0.5, wait_s=60.0)

    def became_ready(connection: Connection, at: float) -> None:
        connection.execute(update(TurnRow).where(TurnRow.scope == "few").values(updated_at=at))

    await store.write(became_ready, now)
    assert await leased(store, 16, share) == {}
    assert await leased(store, 6, share) == {"many": 3, "few": 3}
    await waiting_more(store)
    await store.write(became_ready, now - 61)
    assert await leased(store, 16, share) == {"many": 13, "few": 3}


async def waiting_more(store: Store) -> None:
    """The few have three again."""
    await store.release_leases(TRAINER)


async def test_alone_a_scope_fills_batches(store: Store) -> None:
    await waiting(store, READY, only=40)
    assert await leased(store, 16, Share(most=0.1, wait_s=1e9)) == {"only": 16}


async def test_a_small_share_is_at_least_an_equal_part(store: Store) -> None:
    await waiting(store, READY, a=40, b=40)
    assert await leased(store, 15, Share(most=0.01, wait_s=1e9)) == {"a": 8, "b": 7}


@given(st.lists(st.integers(0, 12), max_size=6), st.integers(1, 20), st.none() | st.integers(1, 12))
def test_dealing(lengths: Sequence[int], limit: int, most: int | None) -> None:
    queues = [[(name, place) for place in range(length)] for name, length in enumerate(lengths)]
    dealt = deal(queues, limit, most)
    assert len(dealt) == min(limit, sum(min(n, n if most is None else most) for n in lengths))
    counts = Counter(name for name, _ in dealt)
    for name, queue in enumerate(queues):
        assert [one for one in dealt if one[0] == name] == queue[: counts[name]]
        # Nobody has two more than another who still has some.
        given_up = counts[name] < min(len(queue), most or len(queue))
        assert not given_up or counts[name] >= max(counts.values()) - 1


@given(st.floats(0.01, 1), st.integers(1, 64), st.integers(1, 20))
def test_a_share_never_keeps_a_batch_from_being_filled(
    most: float, count: int, num_scopes: int
) -> None:
    assert Share(most=most).of(count, num_scopes) * num_scopes >= count
    assert UNCAPPED.of(count, num_scopes) == count


def plans(connection: Connection, work: Callable[[], object]) -> list[str]:
    """How the database would run the statements by which `work` looks for waiting turns."""
    seen: list[tuple[str, Any]] = []

    def note(_c: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if statement.startswith(("SELECT", "WITH")) and "scope" in statement:
            seen.append((statement, parameters))

    event.listen(connection, "before_cursor_execute", note)
    work()
    event.remove(connection, "before_cursor_execute", note)
    prefix = "EXPLAIN QUERY PLAN " if connection.dialect.name == "sqlite" else "EXPLAIN "
    return [
        "\n".join(str(tuple(row)) for row in connection.exec_driver_sql(prefix + text, values))
        for text, values in seen
    ]


async def test_what_is_taken_is_found_by_index_however_long_the_history(store: Store) -> None:
    await waiting(store, TurnState.TRAINED, many=20_000)
    like = "many-000000"
    for state in (JUDGING, READY):
        for scope, count in (("a", 3000), ("b", 3)):
            await store.write(copies, like, f"{scope}-{state}", state, count)
    if store.config.sqlite_path is None:
        await store.write(lambda connection: connection.exec_driver_sql("ANALYZE turns"))

    def work(connection: Connection) -> list[str]:
        options: dict[str, Any] = {"owner": "o", "now": 2e6, "ttl_s": 60.0}
        return plans(
            connection,
            lambda: (
                queues.claim_op(connection, JUDGING, limit=8, **options),
                training.lease_op(connection, count=8, **options),
            ),
        )

    found = await store.write(work)
    assert len(found) >= 8
    for plan in found:
        assert "ix_turns_state_priority_scope_created_at" in plan, plan
        assert "SCAN turns" not in plan
        assert "Seq Scan on turns" not in plan
        assert "USE TEMP B-TREE FOR ORDER BY" not in plan
