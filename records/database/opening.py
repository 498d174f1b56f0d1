"""Why a database cannot be opened, in one line: what it is, where, and what to do.

It looks at a SQLite file before anything is opened, and turns what a driver raises into words. It
knows no tables.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from records.config import StoreConfig
from records.database import schema
from records.database.database import readers
from records.database.locking import FairFileLock
from records.errors import StoreSchemaError, StoreUnavailable

_MAGIC = b"SQLite format 3\x00"
_FOREIGN_LOCK_S = 1.0
"""How long to wait for another program's lock before it is reported."""
_CORRECT = "or correct store.url"


def name_of(config: StoreConfig) -> str:
    """The database as its owner knows it: a file, or a URL without the password."""
    path = config.sqlite_path
    return str(path) if path else make_url(config.url).render_as_string(hide_password=True)


def check_file(config: StoreConfig) -> None:
    """Raise StoreUnavailable for a SQLite file that cannot be the store; a missing one is created
    later. Does nothing for PostgreSQL.
    """
    path = config.sqlite_path
    if path is None:
        return
    if not path.parent.is_dir():
        raise StoreUnavailable(f"the folder of the database does not exist: {path.parent}")
    if path.is_dir():
        raise StoreUnavailable(f"{path} is a folder, and the database is a file: move it away")
    # Its log and its locks are files next to it.
    wanted = [path, path.parent] if path.exists() else [path.parent]
    for one in wanted:
        if not os.access(one, os.R_OK | os.W_OK, effective_ids=True):
            raise StoreUnavailable(
                f"{one} cannot be written by this user: the database needs that; change its owner "
                "or its permissions"
            )
    if path.exists() and path.stat().st_size:
        with path.open("rb") as file:
            begin = file.read(len(_MAGIC))
        if begin != _MAGIC:
            raise StoreUnavailable(f"{path} is not a database of SQLite{_what_to_do(path)}")


def check_unlocked(config: StoreConfig) -> None:
    """As `check_file`; raises StoreUnavailable also while another program locks a SQLite file.
    Writers of this program take turns, and are waited for elsewhere.
    """
    check_file(config)
    path = config.sqlite_path
    if path is None or not path.exists():
        return
    lock = FairFileLock(path, _FOREIGN_LOCK_S)
    try:
        with lock.held():
            _begin(path)
    except TimeoutError:
        return  # a writer of this program
    finally:
        lock.close()


def _begin(path: Path) -> None:
    address = f"file:{quote(str(path))}?mode=rw"
    try:
        with closing(
            sqlite3.connect(address, uri=True, timeout=_FOREIGN_LOCK_S, isolation_level=None)
        ) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            raise StoreUnavailable(
                f"{path} is locked by another program: end its transaction or the program (lsof "
                f"{path} names it)"
            ) from None
        raise StoreUnavailable(f"{path}: {error}") from None
    except sqlite3.DatabaseError as error:
        raise StoreUnavailable(f"{path} is damaged ({error}){_what_to_do(path)}") from None


async def check_readable(config: StoreConfig) -> None:
    """Raise StoreUnavailable for a database that cannot be read, and StoreSchemaError for one from
    a newer program.
    """
    connections = readers(config)
    try:
        revision = await connections.run(schema.current_revision)
        schema.check_revision(revision)
    except (SQLAlchemyError, OSError) as error:
        raise unavailable(error, config) from error
    except StoreSchemaError as error:
        raise StoreSchemaError(f"{name_of(config)}: {error}") from None
    finally:
        await connections.close()


def unavailable(error: BaseException, config: StoreConfig) -> StoreUnavailable:
    """The error that a driver raised while the database was opened, as one line."""
    path = config.sqlite_path
    cause = _innermost(error)
    if path is None:
        return StoreUnavailable(f"PostgreSQL {_postgresql_reason(cause, config)}")
    if isinstance(cause, sqlite3.DatabaseError) and not isinstance(cause, sqlite3.OperationalError):
        return StoreUnavailable(f"{path} is damaged ({cause}){_what_to_do(path)}")
    return StoreUnavailable(f"{path}: the database is not available: {cause}")


def _what_to_do(path: Path) -> str:
    return f": move {path.name} away, and restore a backup (opd records restore)"


def _postgresql_reason(cause: BaseException, config: StoreConfig) -> str:
    url = make_url(config.url)
    place = f"at {url.host or 'localhost'}:{url.port or 5432}"
    state = getattr(cause, "sqlstate", None) or ""
    said = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
    if state == "3D000":
        return f"{place} has no database {url.database!r}: create it (createdb), {_CORRECT}"
    if state == "28P01":
        return f"{place} refuses the password of {url.username!r}: correct store.url"
    if state.startswith("28"):
        return f"{place} does not let {url.username!r} in ({said}): create the role, {_CORRECT}"
    if isinstance(cause, ConnectionError):
        return f"does not answer {place}, where nothing listens: start it, {_CORRECT}"
    if isinstance(cause, TimeoutError):
        return f"does not answer {place} in time: start it, {_CORRECT}"
    if isinstance(cause, OSError):
        return f"{place} cannot be reached ({cause.strerror or said}): {_CORRECT[3:]}"
    return f"{place} is not available: {said}"


def _innermost(error: BaseException) -> BaseException:
    *_, last = _causes(error)
    return last


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes, down to the driver's own."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.orig if isinstance(seen, DBAPIError) else seen.__cause__
