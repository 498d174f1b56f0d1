"""Connections: one that writes and a few that read per process, on SQLite or PostgreSQL.

It knows drivers, pragmas and which errors are temporary, but no tables. A write is a function of a
connection that runs in one transaction; a read runs without one. On SQLite they run in their own
threads: the write lock is never held while the event loop is busy with something else, and a
cancelled caller leaves nothing half-closed.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from records.config import SQLITE, StoreConfig
from records.database.locking import FairFileLock
from records.errors import StoreUnavailable

T = TypeVar("T")

_SQLITE_BUSY = ("database is locked", "database table is locked", "database schema is locked")
# serialization_failure, deadlock_detected, lock_not_available
_POSTGRESQL_CONFLICT = ("40001", "40P01", "55P03")
# The classes of lost connections, of missing resources (disk, memory, connections) and of failing
# disks; shutdowns; a server that is read-only for now.
_POSTGRESQL_GONE = ("08", "53", "57P", "58", "25006")
# Damaged tables or indexes.
_POSTGRESQL_DAMAGED = ("XX001", "XX002")
_SQLITE_AILING = frozenset(
    (
        *(sqlite3.SQLITE_PERM, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_READONLY),
        *(sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CORRUPT),
        *(sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PROTOCOL),
        *(sqlite3.SQLITE_SCHEMA, sqlite3.SQLITE_NOTADB),
    )
)
# Otherwise a statement's plan is made once, after its fifth run, and kept. In a store that is still
# empty then, it reads whole tables, and keeps doing so as they grow, until they are analyzed.
_PLANNING = {"plan_cache_mode": "force_custom_plan"}


class Transactions(Protocol):
    """Runs functions of a connection, each in one write transaction, one at a time."""

    async def run(self, function: Callable[[Connection], T]) -> T:
        """The function's result once it is committed; rolled back if it raises."""
        ...

    async def close(self) -> None:
        """Disconnect."""
        ...


class Readers(Protocol):
    """Runs functions of connections that only read; each statement sees what is committed."""

    async def run(self, function: Callable[[Connection], T]) -> T:
        """The function's result. Raises what it raises, StoreUnavailable once closed."""
        ...

    async def close(self) -> None:
        """Disconnect once all running functions have ended."""
        ...


class SqliteTransactions:
    """Write transactions on a SQLite file, in one thread, taking turns with other processes."""

    def __init__(self, config: StoreConfig, path: Path) -> None:
        self._config = config
        self._path = path
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store-writer")
        self._engine: Engine | None = None
        self._lock: FairFileLock | None = None

    async def run(self, function: Callable[[Connection], T]) -> T:
        """As `Transactions.run`. Raises TimeoutError or OperationalError while it stays locked."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, function)

    def _run(self, function: Callable[[Connection], T]) -> T:
        if self._engine is None or self._lock is None:
            self._lock = FairFileLock(self._path, self._config.busy_timeout_s)
            self._engine = _sqlite_writer(self._config, self._path)
        with self._lock.held(), self._engine.begin() as connection:
            return function(connection)

    async def close(self) -> None:
        """Close the connection and the lock files, and end the thread."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown()

    def _close(self) -> None:
        if self._engine is not None:
            self._engine.dispose()
        if self._lock is not None:
            self._lock.close()


class PostgresqlTransactions:
    """Write transactions on a PostgreSQL server."""

    def __init__(self, config: StoreConfig) -> None:
        self._engine = _postgresql_engine(config, pool_size=1)

    async def run(self, function: Callable[[Connection], T]) -> T:
        """As `Transactions.run`. Raises TimeoutError if the server does not answer."""
        async with self._engine.begin() as connection:
            return await connection.run_sync(function)

    async def close(self) -> None:
        """Close the connection."""
        await self._engine.dispose()


class SqliteReaders:
    """Reads of a SQLite file, in as many threads as there are connections."""

    def __init__(self, config: StoreConfig, path: Path) -> None:
        size = config.reader_connections
        self._engine = _sqlite_engine(config, path, size, "PRAGMA query_only=ON")
        self._threads = ThreadPoolExecutor(max_workers=size, thread_name_prefix="store-reader")
        self._is_closed = False

    async def run(self, function: Callable[[Connection], T]) -> T:
        """As `Readers.run`. A cancelled caller's function still runs to its end; its result is
        discarded.
        """
        if self._is_closed:
            raise StoreUnavailable("the store is closed")
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, function)

    def _run(self, function: Callable[[Connection], T]) -> T:
        with self._engine.connect() as connection:
            return function(connection)

    async def close(self) -> None:
        """Wait for running functions, end the threads and disconnect."""
        self._is_closed = True
        await asyncio.to_thread(self._threads.shutdown)
        self._engine.dispose()


class PostgresqlReaders:
    """Reads on a PostgreSQL server."""

    def __init__(self, config: StoreConfig) -> None:
        self._engine = _postgresql_engine(
            config, pool_size=config.reader_connections, isolation_level="AUTOCOMMIT"
        )
        self._is_closed = False

    async def run(self, function: Callable[[Connection], T]) -> T:
        """As `Readers.run`. Raises TimeoutError if the server does not answer."""
        if self._is_closed:
            raise StoreUnavailable("the store is closed")
        async with self._engine.connect() as connection:
            return await connection.run_sync(function)

    async def close(self) -> None:
        """Close the connections."""
        self._is_closed = True
        await self._engine.dispose()


def write_transactions(config: StoreConfig) -> Transactions:
    """The writing side of a store."""
    path = config.sqlite_path
    return PostgresqlTransactions(config) if path is None else SqliteTransactions(config, path)


def readers(config: StoreConfig) -> Readers:
    """The reading side of a store."""
    path = config.sqlite_path
    return PostgresqlReaders(config) if path is None else SqliteReaders(config, path)


def _postgresql_engine(config: StoreConfig, **options: Any) -> AsyncEngine:
    limit_s = config.command_timeout_s
    arguments: dict[str, Any] = {"server_settings": _PLANNING}
    if limit_s is not None:
        arguments |= {"timeout": limit_s, "command_timeout": limit_s}
    engine = create_async_engine(config.url, max_overflow=0, connect_args=arguments, **options)

    @event.listens_for(engine.sync_engine, "handle_error")
    def _on_error(context: ExceptionContext) -> None:
        # The state of a connection that does not answer is unknown. Rolling back on it would wait
        # as long again, and the other connections of the pool lead to the same server.
        if isinstance(context.original_exception, TimeoutError):
            context.is_disconnect = True

    return engine


def _sqlite_writer(config: StoreConfig, path: Path) -> Engine:
    engine = _sqlite_engine(config, path, 1, "PRAGMA journal_mode=WAL", "PRAGMA synchronous=FULL")

    @event.listens_for(engine, "begin")
    def _begin_immediate(connection: Connection) -> None:
        # A deferred transaction that starts with a read and then writes fails at once with
        # "database is locked", whatever the busy timeout, if another process wrote in between.
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def _sqlite_engine(config: StoreConfig, path: Path, size: int, *pragmas: str) -> Engine:
    url = URL.create(SQLITE, database=str(path))
    engine = create_engine(url, pool_size=size, max_overflow=0)

    @event.listens_for(engine, "connect")
    def _on_connect(connection: Any, _record: Any) -> None:
        # Without this the driver opens deferred transactions of its own before each write.
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout={int(config.busy_timeout_s * 1000)}")
        cursor.execute("PRAGMA foreign_keys=ON")
        for pragma in pragmas:
            cursor.execute(pragma)
        cursor.close()

    return engine


def is_busy(error: BaseException) -> bool:
    """Whether SQLite gave up waiting for a lock."""
    return isinstance(error, DBAPIError) and any(text in str(error.orig) for text in _SQLITE_BUSY)


def is_conflict(error: BaseException) -> bool:
    """Whether PostgreSQL undid the transaction because of a concurrent one."""
    return _sqlstate(error).startswith(_POSTGRESQL_CONFLICT)


def is_gone(error: BaseException) -> bool:
    """Whether the server could not be reached, hung up, or lacks disk, memory or connections."""
    if isinstance(error, DBAPIError):
        return error.connection_invalidated or _sqlstate(error).startswith(_POSTGRESQL_GONE)
    return isinstance(error, OSError)


def is_of_schema(error: BaseException) -> bool:
    """Whether a table or a column is not there."""
    if isinstance(error, DBAPIError) and isinstance(error.orig, sqlite3.Error):
        return str(error.orig).startswith(("no such table", "no such column"))
    return _sqlstate(error) in ("42P01", "42703")


def is_transient(error: BaseException) -> bool:
    """Whether the same transaction may succeed when it is tried again."""
    return is_busy(error) or is_conflict(error) or is_gone(error)


def is_ailing(error: DBAPIError) -> bool:
    """Whether the database is in trouble (locked, gone, full, damaged), whatever it was asked."""
    if is_transient(error) or _sqlstate(error) in _POSTGRESQL_DAMAGED:
        return True
    code = getattr(error.orig, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in _SQLITE_AILING


def _sqlstate(error: BaseException) -> str:
    if not isinstance(error, DBAPIError):
        return ""
    return getattr(error.orig, "sqlstate", None) or ""
