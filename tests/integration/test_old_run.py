"""A run folder that an earlier program left opens under this one, on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from openai import AsyncOpenAI
from sqlalchemy import Boolean, Connection, MetaData
from typer.testing import CliRunner

import records
from opd.cli.app import app
from opd.processes.supervisor import free_ports
from records.care.verify import verify_database
from records.config import StoreConfig
from records.database import schema
from records.names import TurnState
from records.store import Store
from tests.integration.old_run import MODEL, SCHEMA, TURNS, VERSION, OldRun, unpack
from tests.records.conftest import new_database

ROOT = Path(__file__).parents[2]
LATER = [
    {"role": "user", "content": "Hello again, world! 0"},
    {"role": "assistant", "content": "ra"},
    {"role": "user", "content": "Shorter."},
    {"role": "assistant", "content": "*d"},
]
"""Its conversation "later", whose first turn was ready and whose second had no next state yet."""
LATER_IDS = [[337], [12, 738]]


@pytest.fixture
def old_run(tmp_path: Path) -> OldRun:
    return unpack(tmp_path)


def opd(old_run: OldRun, *arguments: str) -> str:
    """What a command of its own process prints; it must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", "opd.cli.app", *arguments],
        cwd=ROOT,
        env=os.environ | old_run.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def turns_by_state(database: Path) -> dict[str, int]:
    query = "SELECT coalesce(drop_reason, state), count(*) FROM turns GROUP BY 1"
    connection = sqlite3.connect(database)
    try:
        return dict(connection.execute(query))
    finally:
        connection.close()


def test_the_archive_is_of_the_earlier_program(old_run: OldRun) -> None:
    connection = sqlite3.connect(old_run.database)
    assert connection.execute("SELECT version_num FROM alembic_version").fetchone() == (SCHEMA,)
    connection.close()
    assert turns_by_state(old_run.database) == TURNS


async def test_its_store_is_brought_forward_and_keeps_every_turn(old_run: OldRun) -> None:
    config = StoreConfig.sqlite(old_run.database)
    async with await Store.open(config) as store:
        assert await store.writer.run(schema.current_revision) == schema.HEAD
        latest = await store.latest_version()
        assert latest is not None
        assert latest.version == VERSION
    assert await verify_database(config) == []
    assert turns_by_state(old_run.database) == TURNS


async def test_its_records_are_verified_and_diagnosed(old_run: OldRun) -> None:
    where = ["--run", str(old_run.config.parent)]
    early = await asyncio.to_thread(CliRunner().invoke, app, ["records", "verify", *where])
    assert (early.exit_code, "start the run once" in early.output) == (1, True)
    async with await Store.open(StoreConfig.sqlite(old_run.database)):
        pass
    verified = await asyncio.to_thread(CliRunner().invoke, app, ["records", "verify", *where])
    assert verified.exit_code == 0, verified.output
    assert "manifests and store agree" in verified.output
    told = await asyncio.to_thread(CliRunner().invoke, app, ["doctor", "later", "--json", *where])
    assert told.exit_code == 0, told.output
    [session] = json.loads(told.stdout)
    assert [turn["waits_for"] for turn in session["turns"]] == ["batch", "next_state"]


def test_its_sessions_are_exported_with_the_ids_that_were_sampled(
    old_run: OldRun, tmp_path: Path
) -> None:
    out = tmp_path / "exported"
    opd(old_run, "records", "export", "--run", str(old_run.config.parent), "--out", str(out))
    rows = [json.loads(line) for line in (out / "sessions.jsonl").read_text().splitlines()]
    [later] = [row for row in rows if row["session_name"] == "later"]
    assert [json.loads(turn)["response_ids"] for turn in later["turns"]] == LATER_IDS
    assert sum(len(row["turns"]) for row in rows) == sum(TURNS.values())
    assert len((out / "samples.jsonl").read_text().splitlines()) == TURNS["trained"]


@pytest.mark.long
async def test_it_is_served_and_trained_on_from_where_it_stood(old_run: OldRun) -> None:
    """Its ready turn makes the next version, and an old conversation goes on."""
    port = free_ports(1)[0]
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "opd.cli.app", "serve", "--model", MODEL],
        *["--run", str(old_run.folder), "--port", str(port)],
        *["--set", "trainer.rollout_batch_size=1", "--set", f"trainer.max_steps={VERSION + 1}"],
        *["--set", "trainer.learning_rate=0.001"],
        cwd=ROOT,
        env=os.environ | old_run.environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    seen = b""
    try:
        async with asyncio.timeout(120):
            while b"Ctrl-C" not in seen:
                line = await process.stdout.readline()
                assert line, f"serve ended: {seen.decode()}"
                seen += line
        messages = [*LATER, {"role": "user", "content": "Once more."}]
        url = f"http://127.0.0.1:{port}/v1"
        async with AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
            reply = await client.chat.completions.create(
                model="policy",
                messages=messages,  # type: ignore[arg-type]
                max_tokens=8,
                extra_headers={"X-Session-Id": "later"},
            )
        turn_id = reply.id.removeprefix("chatcmpl-")
        config = StoreConfig.sqlite(old_run.database)
        async with await Store.open(config) as store, asyncio.timeout(60):
            [session] = await store.sessions_named("later")
            assert [turn.turn_id for turn in session.turns][2:] == [turn_id]
            waited = await store.turns([session.turns[1].turn_id])
            assert [dict(message) for message in waited[0].next_state] == messages[-1:]
            while (await store.counts())[TurnState.TRAINED] == TURNS["trained"]:
                await asyncio.sleep(0.1)
            latest = await store.latest_version()
            assert latest is not None
            assert latest.version == VERSION + 1
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 60) == 0
    verified = opd(old_run, "records", "verify", "--run", str(old_run.config.parent))
    assert "manifests and store agree" in verified


def test_a_postgresql_store_of_that_program_is_brought_forward(old_run: OldRun) -> None:
    """The schema as that program's migrations made it there, with the rows of the same run."""
    with new_database() as url:
        config = StoreConfig(url=url)
        asyncio.run(_fill_as_then(config, old_run.database))
        asyncio.run(_assert_brought_forward(config))


async def _fill_as_then(config: StoreConfig, database: Path) -> None:
    from sqlalchemy.ext.asyncio import create_async_engine

    source = sqlite3.connect(database)
    source.row_factory = sqlite3.Row

    def fill(connection: Connection) -> None:
        migrations = Config()
        migrations.set_main_option("script_location", f"{Path(records.__file__).parent}/migrations")
        migrations.attributes["connection"] = connection
        command.upgrade(migrations, SCHEMA)
        metadata = MetaData()
        metadata.reflect(connection)
        for table in metadata.sorted_tables:
            if table.name == schema.VERSION_TABLE:
                continue
            columns = {column.name: column.type for column in table.columns}
            rows = [
                {
                    name: bool(row[name])
                    if isinstance(kind, Boolean) and row[name] is not None
                    else row[name]
                    for name, kind in columns.items()
                }
                for row in source.execute(f"SELECT * FROM {table.name}")
            ]
            if rows:
                connection.execute(table.insert(), rows)

    engine = create_async_engine(config.url)
    try:
        async with engine.begin() as connection:
            await connection.run_sync(fill)
    finally:
        await engine.dispose()
        source.close()


async def _assert_brought_forward(config: StoreConfig) -> None:
    async with await Store.open(config) as store:
        assert await store.writer.run(schema.current_revision) == schema.HEAD
        counts = await store.counts()
        drops = await store.drops()
        found = {state.value: number for state, number in counts.items() if number}
        assert found.pop("dropped") == sum(drops.values())
        assert found | {reason.value: number for reason, number in drops.items()} == TURNS
        samples = await store.lease(owner="trainer", count=1, ttl_s=60.0)
        assert [sample.response_ids.tolist() for sample in samples] == LATER_IDS[:1]
        [session] = await store.sessions_named("later")
        assert len(session.turns) == len(LATER_IDS)
        await store.release("trainer", [sample.turn_id for sample in samples])
    assert await verify_database(config) == []
