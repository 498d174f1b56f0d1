"""What only a server does: deadlocks between writers, and connections that it ends."""

from __future__ import annotations

import asyncio
from functools import partial

import asyncpg
import pytest
from sqlalchemy import Connection, insert, select, text, update
from sqlalchemy.exc import IntegrityError

from records.database.schema import _ADVISORY_LOCK
from records.errors import StoreUnavailable
from records.store import Store
from records.tables.models import NodeRow, ToolsetRow
from tests.records.builders import recorded

pytestmark = pytest.mark.parametrize("config", ["postgresql"], indirect=True)


def write(connection: Connection, row: str, body: str) -> None:
    changed = update(ToolsetRow).where(ToolsetRow.toolset_hash == row).values(body=body)
    connection.execute(changed)
    connection.execute(text("SELECT pg_sleep(0.2)"))


async def test_groups_that_deadlock_are_tried_again_and_all_succeed(store: Store) -> None:
    rows = [{"toolset_hash": name, "body": ""} for name in "ab"]
    await store.writer.run(lambda connection: connection.execute(insert(ToolsetRow), rows))
    async with await Store.open(store.config) as other:
        await asyncio.gather(
            store.writer.run(partial(write, row="a", body="1")),
            store.writer.run(partial(write, row="b", body="1")),
            other.writer.run(partial(write, row="b", body="2")),
            other.writer.run(partial(write, row="a", body="2")),
        )
        assert store.writer.num_retries + other.writer.num_retries == 1
    bodies = await store.read(lambda c: list(c.scalars(select(ToolsetRow.body))))
    assert set(bodies) <= {"1", "2"}


async def test_connections_that_the_server_ended_are_replaced(store: Store) -> None:
    turn_id = await recorded(store)
    end_all = text(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    async with await Store.open(store.config) as other:
        await other.read(lambda connection: connection.execute(end_all).all())
    assert await store.turn(turn_id) is not None
    assert await recorded(store)


@pytest.mark.parametrize("code", ["53100", "53200", "58030", "25006"])
async def test_a_server_that_cannot_write_now_is_unavailable(store: Store, code: str) -> None:
    refuse = text(f"DO $$ BEGIN RAISE EXCEPTION 'no room' USING ERRCODE = '{code}'; END $$")
    with pytest.raises(StoreUnavailable, match="no room"):
        await store.writer.run(lambda connection: connection.execute(refuse))


async def test_a_migration_of_another_process_is_waited_for_longer_than_a_command(
    store: Store,
) -> None:
    migrating, done = asyncio.Event(), asyncio.Event()

    async def migrate() -> None:
        connection = await asyncpg.connect(store.config.url.replace("+asyncpg", ""))
        async with connection.transaction():
            await connection.execute("SELECT pg_advisory_xact_lock($1)", _ADVISORY_LOCK)
            migrating.set()
            await done.wait()
        await connection.close()

    async with asyncio.TaskGroup() as group:
        group.create_task(migrate())
        await migrating.wait()
        hasty = store.config.model_copy(update={"command_timeout_s": 0.2})
        opening = group.create_task(Store.open(hasty))
        await asyncio.sleep(1.0)
        assert not opening.done()
        done.set()
    await opening.result().close()


async def test_what_contradicts_the_schema_is_not_tried_again(store: Store) -> None:
    def twice(connection: Connection) -> None:
        for _ in range(2):
            connection.execute(insert(ToolsetRow), {"toolset_hash": "a", "body": ""})

    with pytest.raises(IntegrityError):
        await store.writer.run(twice)
    assert store.writer.num_retries == 0


async def test_a_store_that_grows_is_not_read_by_the_plans_it_had_when_it_was_small(
    store: Store,
) -> None:
    few, many = 1_000, 50_000
    wanted = select(NodeRow.body).where(NodeRow.node_id.in_([f"{number}" for number in range(8)]))
    fill = text(
        "INSERT INTO message_nodes (node_id, scope, depth, body_hash, body) "
        "SELECT 'node ' || number, '', 0, '', '{}' FROM generate_series("
        "CAST(:first AS integer), CAST(:last AS integer)) number"
    )
    passed_over = text(
        "SELECT seq_tup_read FROM pg_stat_xact_user_tables WHERE relname = 'message_nodes'"
    )

    def rows_passed_over(connection: Connection) -> int:
        before = connection.execute(passed_over).scalar_one()
        connection.execute(wanted).all()
        return connection.execute(passed_over).scalar_one() - before

    await store.writer.run(lambda connection: connection.execute(fill, {"first": 1, "last": few}))
    for _ in range(10):
        await store.writer.run(rows_passed_over)
    rest = {"first": few + 1, "last": many}
    await store.writer.run(lambda connection: connection.execute(fill, rest))
    assert await store.writer.run(rows_passed_over) < many
