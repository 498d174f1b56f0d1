"""A store without rows per test: on SQLite and, where a server answers, on PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import asyncpg
import pytest
from sqlalchemy.engine import make_url

from records.config import StoreConfig
from records.store import Store
from records.tables import key_rows as _keys  # noqa: F401  its tables
from records.tables.models import Base
from tests.records.new_store import new_store

SERVER = "postgres@127.0.0.1:5432"
_EMPTY = "; ".join(
    [
        # Without looking at foreign keys: the order of the tables would matter.
        "SET session_replication_role = replica",
        *(f"DELETE FROM {table}" for table in [*Base.metadata.tables, "turn_words"]),
    ]
)
"""A fraction of what truncating takes, which writes a new file for each table and index."""


class Clock:
    """Unix seconds that a test moves; each reading is a little later than the last."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


async def _execute(statement: str, database: str = "test") -> None:
    connection = await asyncpg.connect(f"postgresql://{SERVER}/{database}", timeout=3)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


def empty(url: str) -> None:
    """Delete all rows of a PostgreSQL store."""
    asyncio.run(_execute(_EMPTY, make_url(url).database or ""))


@contextmanager
def new_database() -> Iterator[str]:
    """The URL of an empty database that is dropped afterwards; skips the test without a server."""
    name = f"records_{uuid4().hex}"
    try:
        asyncio.run(_execute(f"CREATE DATABASE {name}"))
    except (OSError, TimeoutError, asyncpg.PostgresError) as error:
        pytest.skip(f"no PostgreSQL server at {SERVER}: {error}")
    try:
        yield f"postgresql+asyncpg://{SERVER}/{name}"
    finally:
        asyncio.run(_execute(f"DROP DATABASE {name} WITH (FORCE)"))


@contextmanager
def quick_database() -> Iterator[str]:
    """As `new_database`, for tests that pull no plug: no commit waits for the disk."""
    with new_database() as url:
        name = make_url(url).database
        asyncio.run(_execute(f"ALTER DATABASE {name} SET synchronous_commit = off"))
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreConfig]:
    """The configuration of a database without rows."""
    if request.param == "sqlite":
        yield new_store(tmp_path / "records.db")
        return
    url = request.getfixturevalue("server_url")
    yield StoreConfig(url=url)
    empty(url)


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_config(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreConfig]:
    """The configuration of a database without tables."""
    if request.param == "sqlite":
        yield StoreConfig.sqlite(tmp_path / "records.db")
        return
    with new_database() as url:
        yield StoreConfig(url=url)


@pytest.fixture
def sqlite_config(tmp_path: Path) -> StoreConfig:
    """The configuration of a new SQLite file."""
    return StoreConfig.sqlite(tmp_path / "records.db")


@pytest.fixture
def clock() -> Clock:
    """The clock of the store under test."""
    return Clock()


@pytest.fixture
async def store(config: StoreConfig, clock: Clock) -> AsyncIterator[Store]:
    """An open store on an empty database."""
    async with await Store.open(config, clock) as opened:
        yield opened
