from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect, text

import records
from records.config import StoreConfig
from records.database import schema
from records.errors import StoreSchemaError, StoreUnavailable
from records.store import Store
from records.tables.models import Base
from tests.records.builders import recorded

MIGRATIONS = Path(records.__file__).parent / "migrations"


def is_ours(_object: object, name: str | None, kind: str, *_: object) -> bool:
    """Whether a model describes it: not the index of texts, nor FTS5's own tables for it."""
    return kind != "table" or not str(name).startswith("turn_words")


@pytest.fixture
async def fresh(empty_config: StoreConfig) -> AsyncIterator[Store]:
    """A store on a database that was empty."""
    async with await Store.open(empty_config) as store:
        yield store


async def test_an_empty_database_gets_the_schema_of_the_models(fresh: Store) -> None:
    def differences(connection: Connection) -> list:
        options = {"compare_type": True, "include_object": is_ours}
        context = MigrationContext.configure(connection, opts=options)
        return compare_metadata(context, Base.metadata)

    assert await fresh.writer.run(schema.current_revision) == schema.HEAD
    assert await fresh.writer.run(differences) == []


def test_the_head_is_the_newest_migration() -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    scripts = ScriptDirectory.from_config(config)
    assert scripts.get_current_head() == schema.HEAD
    assert {script.revision for script in scripts.walk_revisions()} == set(schema.KNOWN)


async def test_reopening_keeps_what_is_stored(empty_config: StoreConfig) -> None:
    async with await Store.open(empty_config) as store:
        turn_id = await recorded(store)
    async with await Store.open(empty_config) as store:
        assert await store.turn(turn_id) is not None


async def test_the_first_migration_can_be_undone(fresh: Store) -> None:
    def downgrade(connection: Connection) -> list[str]:
        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS))
        config.attributes["connection"] = connection
        command.downgrade(config, "base")
        return inspect(connection).get_table_names()

    assert await fresh.writer.run(downgrade) == [schema.VERSION_TABLE]


async def test_a_newer_schema_is_refused_and_left_alone(empty_config: StoreConfig) -> None:
    async with await Store.open(empty_config) as store:
        rename = text(f"UPDATE {schema.VERSION_TABLE} SET version_num = '9999'")
        await store.writer.run(lambda connection: connection.execute(rename))
    with pytest.raises(StoreSchemaError, match=r"'9999'.*newer version"):
        await Store.open(empty_config)


async def test_two_that_open_a_new_database_at_once_both_succeed(empty_config: StoreConfig) -> None:
    stores = await asyncio.gather(*(Store.open(empty_config) for _ in range(4)))
    assert await stores[0].turn(await recorded(stores[1])) is not None
    for store in stores:
        await store.close()


@pytest.mark.timeout(120)
async def test_processes_that_open_a_new_database_at_once_all_succeed(
    empty_config: StoreConfig,
) -> None:
    program = (
        "import asyncio, sys\n"
        "from records.config import StoreConfig\n"
        "from records.store import Store\n"
        "async def main():\n"
        "    await (await Store.open(StoreConfig(url=sys.argv[1]))).close()\n"
        "asyncio.run(main())\n"
    )
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, empty_config.url, stderr=asyncio.subprocess.PIPE
        )
        for _ in range(3)
    ]
    for process in processes:
        _, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()


async def test_a_database_in_no_folder_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="folder of the database"):
        await Store.open(StoreConfig.sqlite(tmp_path / "nowhere" / "records.db"))


async def test_a_server_that_does_not_answer_is_unavailable() -> None:
    config = StoreConfig(url="postgresql+asyncpg://nobody@127.0.0.1:1/none", lock_retries=1)
    with pytest.raises(StoreUnavailable, match="where nothing listens"):
        await Store.open(config)


async def test_a_file_that_is_no_database_is_an_error(sqlite_config: StoreConfig) -> None:
    assert sqlite_config.sqlite_path is not None
    sqlite_config.sqlite_path.write_text("not a database, but long enough to look like one" * 50)
    with pytest.raises(StoreUnavailable, match="not a database"):
        await Store.open(sqlite_config)


def test_the_store_imports_without_torch_and_without_alembic() -> None:
    program = (
        "import sys, records.store; "
        "sys.exit(repr({'torch', 'transformers', 'alembic'} & set(sys.modules) or ''))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stderr.strip() == "''"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nonsense", "not a database URL"),
        ("sqlite+aiosqlite:///records.db", "not supported"),
        ("mysql://host/x", "not supported"),
        ("sqlite:///:memory:", "needs a file"),
        ("sqlite://", "needs a file"),
    ],
)
def test_other_urls_are_refused_with_what_to_do(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StoreConfig(url=url)
