"""Where the store is and how patient it is."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from records.privacy.detectors import SECRETS
from records.privacy.personal_data import PERSONAL

SQLITE = "sqlite"
POSTGRESQL = "postgresql+asyncpg"


class RetentionConfig(BaseModel):
    """How long sessions are kept."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    max_age_days: float | None = Field(default=None, gt=0)
    """Sessions not seen for this long are deleted, trained or not; unset: they are kept."""
    sweep_interval_s: float = Field(default=3600.0, gt=0)
    """Pause between two searches for such sessions."""


Mode = Literal["off", "mark", "redact"]
"""A finding is not searched for; counted and named with its turn; removed from what is stored."""


class RedactionConfig(BaseModel):
    """What is removed before anything is judged or trained (docs/records.md)."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    secrets: Mode = "redact"
    """Keys, tokens and passwords in the known formats of services."""
    personal: Mode = "redact"
    """E-mail addresses, phone, account, card and US social security numbers."""
    kinds: dict[str, Mode] = Field(default_factory=dict)
    """Another mode for single kinds, including your own: `email = "mark"`."""
    patterns: dict[str, str] = Field(default_factory=dict)
    """Further kinds: a name and a regular expression (Python's)."""
    phone_region: str | None = Field(default=None, pattern="^[A-Z]{2}$")
    """Country of phone numbers without a country code (DE, US, ...); unset: they are not found."""
    allow: list[str] = Field(default_factory=list)
    """Texts that are not findings, such as an address in an agent's own tools. Each is given as
    text or as `sha256:` and its digest, which `opd doctor` prints.
    """
    max_chars: int = Field(default=1_000_000, ge=1000)
    """Maximum characters of a request's messages and tools together; a longer one is refused."""

    @field_validator("allow")
    @classmethod
    def _digests_are_whole(cls, value: list[str]) -> list[str]:
        for text in value:
            if re.fullmatch(r"sha256:(?![0-9a-f]{32}$).*", text, re.DOTALL):
                raise ValueError(
                    f"{text!r} is not a digest: 32 hexadecimal digits follow, "
                    "as `opd doctor` prints"
                )
        return value

    @model_validator(mode="after")
    def _known_kinds(self) -> RedactionConfig:
        known = {*SECRETS, *PERSONAL, *self.patterns}
        for kind in self.kinds:
            if kind not in known:
                near = difflib.get_close_matches(kind, known, n=1, cutoff=0.4)
                meant = f"did you mean {near[0]!r}?" if near else f"known: {sorted(known)}"
                raise ValueError(f"kinds: unknown {kind!r}; {meant}")
        for kind, pattern in self.patterns.items():
            if kind in (*SECRETS, *PERSONAL):
                raise ValueError(f"patterns: {kind!r} is already a kind, choose another name")
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"patterns.{kind}: not a regular expression: {error}") from None
        return self


class StoreConfig(BaseModel):
    """The database of a run."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    url: str
    """`sqlite:///FILE` (one host) or `postgresql+asyncpg://USER@HOST/DATABASE` (many)."""
    busy_timeout_s: float = Field(default=30.0, gt=0)
    """How long one attempt waits for another process's write lock."""
    command_timeout_s: float | None = Field(default=30.0, gt=0)
    """PostgreSQL: how long to wait for a connection, and for the answer to a command. A server that
    does not answer in time counts as unavailable. None: as long as it takes (see `patient`).
    """
    lock_retries: int = Field(default=1, ge=0)
    """Further attempts, with growing pauses, before a write raises StoreUnavailable."""
    group_max: int = Field(default=256, ge=1)
    """Maximum number of write operations that share one transaction."""
    reader_connections: int = Field(default=4, ge=1)
    """Connections of this process that only read."""
    redaction: RedactionConfig = Field(default_factory=RedactionConfig)
    retention: RetentionConfig = Field(default_factory=RetentionConfig)
    spill_folder: Path | None = Field(default=None, strict=False)
    """Where the proxy keeps what the database cannot store; unset: next to a SQLite file, or in the
    run folder with PostgreSQL. On a separate disk, it still works when the database's disk is full.
    """
    spill_reserve_bytes: int = Field(default=16 * 2**20, ge=0)
    """Space that each proxy reserves there when it starts, for when the disk is full."""

    @field_validator("url")
    @classmethod
    def _known_database(cls, url: str) -> str:
        try:
            parsed = make_url(url)
        except (ArgumentError, ValueError) as error:  # the latter for a port that is not a number
            raise ValueError(
                f"not a database URL: {url!r}; write {SQLITE}:///FILE or "
                f"{POSTGRESQL}://USER@HOST:PORT/DATABASE"
            ) from error
        if parsed.drivername not in (SQLITE, POSTGRESQL):
            raise ValueError(
                f"database driver {parsed.drivername!r} is not supported: "
                f"use {SQLITE}:///FILE or {POSTGRESQL}://USER@HOST/DATABASE"
            )
        if parsed.drivername == SQLITE and parsed.database in (None, "", ":memory:"):
            raise ValueError("the store needs a file: several connections share it")
        return url

    @classmethod
    def sqlite(cls, path: Path, **options: object) -> StoreConfig:
        """The configuration of a SQLite store in the file `path`."""
        return cls.model_validate({"url": f"{SQLITE}:///{path}", **options})

    def patient(self) -> StoreConfig:
        """The same database for work that may take long: migrations, vacuum, checks."""
        return self.model_copy(update={"command_timeout_s": None})

    @property
    def is_sqlite(self) -> bool:
        """Whether this is a SQLite file (else PostgreSQL)."""
        return make_url(self.url).drivername == SQLITE

    @property
    def spill_path(self) -> Path:
        """The folder of the spill files. Raises ValueError for PostgreSQL without one."""
        if self.spill_folder is not None:
            return self.spill_folder
        if self.sqlite_path is None:
            raise ValueError(
                "store.spill_folder: name a folder, as PostgreSQL has no file to put it next to"
            )
        return Path(f"{self.sqlite_path}-spill")

    @property
    def sqlite_path(self) -> Path | None:
        """The database file, or None on PostgreSQL."""
        database = make_url(self.url).database
        return Path(database) if self.is_sqlite and database else None
