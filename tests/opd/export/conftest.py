"""A run with a store on SQLite and, where a server answers, on PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from typer.testing import CliRunner, Result

from opd.cli.app import app
from opd.run import config as run_config
from records.config import StoreConfig
from records.store import Store
from tests.examples.shipped import MODEL
from tests.records.conftest import empty
from tests.records.new_store import new_store

T = TypeVar("T")


class ARun:
    """A run's folder, its store, and `opd records export` on it."""

    def __init__(self, folder: Path, store_url: str) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.config_file = folder / "config.toml"
        self.save(model=str(MODEL), url=store_url)

    def save(self, model: str, url: str) -> None:
        """Write the configuration."""
        values = {
            "model": model,
            "renderer": {"name": "default"},
            "store": {"url": url},
            "policy": {"url": "http://127.0.0.1:1"},
            "frozen": {"url": "http://127.0.0.1:2"},
            "judge": {"base_url": "http://127.0.0.1:2/v1", "model": "m", "api_key": "secret"},
            "scoring": {"context_length": 4096},
        }
        run_config.save(run_config.build(values), self.config_file)

    @property
    def store_config(self) -> StoreConfig:
        """The configuration of its store."""
        return run_config.load(self.config_file).store

    def fill(self, work: Callable[[Store], Awaitable[T]]) -> T:
        """Run `work(store)` on the run's store."""

        async def run() -> T:
            async with await Store.open(self.store_config) as store:
                return await work(store)

        return asyncio.run(run())

    def export(self, *arguments: object) -> Result:
        """Call `opd records export` with `--out` the folder `out`."""
        words = ["--config", self.config_file, "--out", self.out, *arguments]
        return CliRunner().invoke(app, ["records", "export", *map(str, words)])

    @property
    def out(self) -> Path:
        """The folder to write."""
        return self.folder / "out"


@pytest.fixture(params=["sqlite", "postgresql"])
def a_run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ARun]:
    """A run without turns, on each kind of database."""
    if request.param == "sqlite":
        yield ARun(tmp_path, new_store(tmp_path / "records.db").url)
        return
    url = request.getfixturevalue("server_url")
    yield ARun(tmp_path, url)
    empty(url)


@pytest.fixture
def sqlite_run(tmp_path: Path) -> ARun:
    """A run without turns, on SQLite."""
    return ARun(tmp_path, new_store(tmp_path / "records.db").url)
