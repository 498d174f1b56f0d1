"""A store per test: on SQLite and, where a server answers, on a PostgreSQL database of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from functools import cache
from pathlib import Path
from uuid import uuid4

import asyncpg
import pytest

from records.config import StoreConfig
from records.store import Store

SERVER = "postgres@127.0.0.1:5432"


class Clock:
    """Unix seconds that a test moves; each reading is a little later than the last."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


async def _execute(statement: str) -> None:
    connection = await asyncpg.connect(f"postgresql://{SERVER}/test", timeout=3)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


@cache
def _postgresql_trouble() -> str | None:
    try:
        asyncio.run(_execute("SELECT 1"))
    except (OSError, TimeoutError, asyncpg.PostgresError) as error:
        return f"no PostgreSQL server at {SERVER}: {error}"
    return None


@pytest.fixture(params=["sqlite", "postgresql"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreConfig]:
    """The configuration of a new, empty database."""
    if request.param == "sqlite":
        yield StoreConfig.sqlite(tmp_path / "records.db")
        return
    if trouble := _postgresql_trouble():
        pytest.skip(trouble)
    name = f"records_{uuid4().hex}"
    asyncio.run(_execute(f"CREATE DATABASE {name}"))
    try:
        yield StoreConfig(url=f"postgresql+asyncpg://{SERVER}/{name}")
    finally:
        asyncio.run(_execute(f"DROP DATABASE {name} WITH (FORCE)"))


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
