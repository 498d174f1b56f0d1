"""Copies of a database in use, and restoring one where there is no database.

SQLite is copied by its backup API, PostgreSQL by pg_dump: both copy a single moment, and writers
are not stopped. A backup is one file and `FILE.json`, which describes it and contains its checksum.
Nothing is ever overwritten. It does not know the tables.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from sqlalchemy import text
from sqlalchemy.engine import URL, make_url

from records.config import StoreConfig
from records.database import schema
from records.database.database import readers
from records.errors import StoreError

FORMAT = 1


class BackupError(StoreError):
    """A backup cannot be taken, or does not match its description; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupFile:
    """The contents of `FILE.json`; `created_at` is when the backup was started (unix seconds)."""

    backup_id: str
    kind: Literal["sqlite", "postgresql"]
    schema: str
    created_at: float
    size: int
    sha256: str

    @classmethod
    def read(cls, path: Path) -> BackupFile:
        """The description of the backup `path`. Raises BackupError."""
        description = _description(path)
        try:
            values = json.loads(description.read_bytes())
            if values.pop("format") != FORMAT:
                raise ValueError("unknown format")
            return cls(**values)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BackupError(
                f"{description}: not the description of a backup ({type(error).__name__}); "
                "it belongs next to the backup and is made with it"
            ) from error

    def check(self, path: Path) -> None:
        """Raises BackupError unless the bytes of `path` are those that were written."""
        try:
            found = (path.stat().st_size, _sha256(path))
        except OSError as error:
            raise BackupError(f"{path}: {error.strerror}") from error
        if found != (self.size, self.sha256):
            raise BackupError(f"{path} is damaged: its bytes are not those of the backup")


def take(config: StoreConfig, destination: Path, backup_id: str, created_at: float) -> BackupFile:
    """Copy the database to `destination`, synced. Raises BackupError."""
    for path in (destination, _description(destination)):
        if path.exists():
            raise BackupError(f"{path} exists: backups are not overwritten, name another file")
    if not destination.parent.is_dir():
        raise BackupError(f"no such folder: {destination.parent}")
    with _complete(destination) as part:
        if config.sqlite_path is not None:
            _copy_sqlite(config.sqlite_path, part)
        else:
            _postgresql("pg_dump", make_url(config.url), "--format=custom", f"--file={part}")
        made = BackupFile(
            backup_id=backup_id,
            kind="sqlite" if config.is_sqlite else "postgresql",
            schema=schema.HEAD,
            created_at=created_at,
            size=part.stat().st_size,
            sha256=_sha256(part),
        )
    with _complete(_description(destination)) as part:
        part.write_text(json.dumps({"format": FORMAT, **asdict(made)}, indent=1) + "\n")
    return made


async def restore(source: Path, config: StoreConfig) -> BackupFile:
    """Restore the backup `source` as the database of `config`, which must not exist yet.

    Raises BackupError for a damaged backup, for one of another kind or from a newer program, and
    for a database that exists.
    """
    made = BackupFile.read(source)
    made.check(source)
    if made.schema not in schema.KNOWN:
        raise BackupError(
            f"{source} has schema {made.schema!r}, this program knows up to {schema.HEAD!r}: "
            "update the program"
        )
    kind = "sqlite" if config.is_sqlite else "postgresql"
    if made.kind != kind:
        raise BackupError(
            f"{source} is a backup of {made.kind}, but store.url names {kind}: "
            f"name a {made.kind} database"
        )
    path = config.sqlite_path
    if path is None:
        await _refuse_tables(config)
        options = ("--exit-on-error", "--single-transaction", "--no-owner", "--no-privileges")
        _postgresql("pg_restore", make_url(config.url), *options, str(source))
        return made
    for existing in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        if existing.exists():
            raise BackupError(f"{existing} exists: nothing is overwritten, move it away first")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _complete(path) as part:
        shutil.copyfile(source, part)
    return made


async def _refuse_tables(config: StoreConfig) -> None:
    tables = text("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'")
    connections = readers(config)
    try:
        found = await connections.run(lambda connection: connection.scalar(tables))
    finally:
        await connections.close()
    if found:
        name = make_url(config.url).database
        raise BackupError(
            f"database {name!r} has {found} tables: nothing is overwritten; create an empty "
            "database and name it in store.url"
        )


def _copy_sqlite(source: Path, part: Path) -> None:
    if not source.is_file():
        raise BackupError(f"no database: {source}")
    address = f"file:{quote(str(source))}?mode=rw"
    try:
        with (
            closing(sqlite3.connect(address, uri=True)) as live,
            closing(sqlite3.connect(part)) as copy,
        ):
            # In one step: with the write-ahead log, readers see a single moment and block nobody.
            live.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")
    except sqlite3.Error as error:
        raise BackupError(f"{source} cannot be copied to {part.parent}: {error}") from error


def _postgresql(program: str, url: URL, *arguments: str) -> None:
    """Run pg_dump or pg_restore on a database. Raises BackupError with its first error line."""
    if shutil.which(program) is None:
        raise BackupError(f"{program} is not installed: it comes with PostgreSQL's client programs")
    where = [f"--dbname={url.database}", "--no-password"]
    for option, value in (("host", url.host), ("port", url.port), ("username", url.username)):
        if value is not None:
            where.append(f"--{option}={value}")
    # On the command line, everybody on this machine could read the password.
    secret = {} if url.password is None else {"PGPASSWORD": url.password}
    done = subprocess.run(
        [program, *where, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **secret},
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise BackupError(f"{program} failed: {said[0]}")


@contextmanager
def _complete(path: Path) -> Iterator[Path]:
    """A file to write that becomes `path`, synced, once the block succeeds."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.touch(mode=0o600)
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.link(part, path)
    except FileExistsError as error:
        raise BackupError(f"{path} exists: nothing is overwritten") from error
    except OSError as error:
        raise BackupError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _description(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
