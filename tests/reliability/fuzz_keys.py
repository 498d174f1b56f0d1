"""Keys for the fuzzer: some that are let in, and everything that is not; and what a store holds."""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
import time
from abc import ABC, abstractmethod
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg

from records.config import StoreConfig
from records.keys import Keys
from records.store import Store

Headers = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class FuzzKeys:
    """Headers to send: each of `accepted` is let in, none of `refused`."""

    accepted: list[Headers]
    refused: list[Headers]


def _bearer(text: str) -> Headers:
    return {"authorization": f"Bearer {text}"}


async def make_keys(store: Store) -> FuzzKeys:
    """Keys of two tenants and of an admin; one that was revoked and one that was rotated away."""
    keys = Keys(store, time.time)
    key, text = await keys.create(actor="fuzz")
    _, other = await keys.create(actor="fuzz")
    _, admin = await keys.create(actor="fuzz", is_admin=True)
    gone, revoked = await keys.create(actor="fuzz", is_admin=True)
    await keys.revoke(gone.key_id, actor="fuzz")
    changed, rotated = await keys.create(actor="fuzz")
    await keys.rotate(changed.key_id, actor="fuzz")
    return FuzzKeys(
        accepted=[_bearer(text), {"x-api-key": other}, _bearer(admin)],
        refused=[
            {},
            _bearer(revoked),
            {"x-api-key": revoked},
            _bearer(rotated),
            _bearer(f"opd_{key.key_id}_{other.rpartition('_')[2]}"),
            _bearer(f"opd_{'0' * 12}_{'a' * 43}"),
            _bearer(text[:-1]),
            _bearer(text + "a"),
            {"authorization": "Bearer"},
            {"authorization": f"Basic {text}"},
            {"cookie": f"key={text}"},
            {"x-api-key": "x" * 5000},
        ],
    )


Content = dict[str, tuple[int, str]]


class StoreWatch(ABC):
    """Sees from outside whether a store changes. Close it."""

    @abstractmethod
    def version(self) -> int:
        """Another number after each row that is written or deleted."""

    @abstractmethod
    def content(self) -> Content:
        """The number of rows of each table, and a hash of all that they hold."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the database."""

    def settled(self, quiet_s: float, patience_s: float) -> Content:
        """The content once nothing was committed for `quiet_s`. Raises TimeoutError."""
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            before = self.version()
            time.sleep(quiet_s)
            if self.version() == before:
                return self.content()
        raise TimeoutError(f"the store still changes after {patience_s:.0f} s without requests")


class SqliteWatch(StoreWatch):
    """A store in a file; its version counts the commits of all other connections."""

    def __init__(self, database: Path) -> None:
        self._connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)

    def version(self) -> int:
        return self._connection.execute("PRAGMA data_version").fetchone()[0]

    def content(self) -> Content:
        names = self._connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        found: Content = {}
        for (name,) in names.fetchall():
            digest, number = hashlib.sha256(), 0
            with closing(self._connection.execute(f'SELECT * FROM "{name}"')) as rows:
                for row in rows:
                    digest.update(repr(row).encode("utf-8", "backslashreplace"))
                    number += 1
            found[name] = (number, digest.hexdigest())
        return found

    def close(self) -> None:
        self._connection.close()


class PostgresqlWatch(StoreWatch):
    """A store on a server; its version is the number of rows of all tables together."""

    def __init__(self, url: str) -> None:
        self._runner = asyncio.Runner()
        plain = url.replace("+asyncpg", "")
        self._connection = self._runner.run(asyncpg.connect(plain))
        rows = self._fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        self._tables = [str(row[0]) for row in rows]

    def version(self) -> int:
        counts = " + ".join(f'(SELECT count(*) FROM "{name}")' for name in self._tables)
        return int(self._fetch(f"SELECT {counts}")[0][0])

    def content(self) -> Content:
        found: Content = {}
        for name in self._tables:
            digest = "md5(coalesce(string_agg(md5(t::text), '' ORDER BY md5(t::text)), ''))"
            row = self._fetch(f'SELECT count(*), {digest} FROM "{name}" t')[0]
            found[name] = (int(row[0]), str(row[1]))
        return found

    def close(self) -> None:
        self._runner.run(self._connection.close())
        self._runner.close()

    def _fetch(self, statement: str) -> list[Any]:
        return self._runner.run(self._connection.fetch(statement))


def watch(config: StoreConfig) -> StoreWatch:
    """A watch of this store."""
    path = config.sqlite_path
    return PostgresqlWatch(config.url) if path is None else SqliteWatch(path)
