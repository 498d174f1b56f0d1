"""What every part of the store is built on: opening and closing, one read, one write."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Concatenate, ParamSpec, Self, TypeVar

from sqlalchemy import Connection, text
from sqlalchemy.exc import SQLAlchemyError

from records.config import StoreConfig
from records.database.database import is_of_schema, is_transient, readers, write_transactions
from records.database.opening import check_file, name_of, unavailable
from records.database.private_files import private_database
from records.database.schema import migrate_op, problem_of
from records.database.writer import GroupWriter, as_store_error
from records.errors import StoreSchemaError, StoreUnavailable
from records.lessons.names import LessonState
from records.messages import Message
from records.names import TurnState
from records.privacy.redaction import Redactor
from records.types import CapturedTurn

P = ParamSpec("P")
T = TypeVar("T")
Clock = Callable[[], float]

_READ_ATTEMPTS = 2
REDACTION_THREADS = 8
"""They take turns: one searches at a time (records/privacy/turnstile.py). Several, so that a short
text need not wait until a long one is done.
"""


def _writer(config: StoreConfig) -> GroupWriter:
    return GroupWriter(
        write_transactions(config), group_max=config.group_max, lock_retries=config.lock_retries
    )


async def _migrate(config: StoreConfig) -> None:
    # With its own writer, which waits for another process's migration of a large store.
    writer = _writer(config.patient())
    writer.start()
    try:
        await writer.run(migrate_op)
    finally:
        await writer.close()


def _make_private(path: Path) -> None:
    try:
        private_database(path)
    except OSError as error:
        raise StoreUnavailable(f"{path}: {error.strerror}") from error


class StoreBase:
    """A connected store without any queries yet."""

    def __init__(self, config: StoreConfig, clock: Clock = time.time) -> None:
        self.config = config
        self._clock = clock
        self.last_scopes: dict[TurnState, str] = {}
        """The scope whose turn was last taken in each state: the next call starts after it."""
        self.last_lesson_scopes: dict[LessonState, str] = {}
        """The same for lessons."""
        self.redactor = Redactor(config.redaction)
        self._redacting = ThreadPoolExecutor(REDACTION_THREADS, "redaction")
        self.readers = readers(config)
        self.writer = _writer(config)

    @classmethod
    async def open(cls, config: StoreConfig, clock: Clock = time.time) -> Self:
        """Connect, migrate if needed, start the writer. `clock` gives unix seconds.

        Raises StoreUnavailable with a line that names the database and what to do, or
        StoreSchemaError for a database from a newer program.
        """
        check_file(config)
        if config.sqlite_path is not None:
            _make_private(config.sqlite_path)
        try:
            await _migrate(config)
        except (StoreUnavailable, SQLAlchemyError, OSError) as error:
            raise unavailable(error, config) from error
        except StoreSchemaError as error:
            raise StoreSchemaError(f"{name_of(config)}: {error}") from None
        store = cls(config, clock)
        store.writer.start()
        return store

    async def close(self) -> None:
        """Commit waiting operations and disconnect."""
        await self.writer.close()
        await self.readers.close()
        self._redacting.shutdown(wait=False, cancel_futures=True)

    async def redact(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a search of texts in threads kept for that; if it is cancelled before it began, it
        never begins. Raises what `work` raises, and StoreUnavailable once the store is closed.
        """
        try:
            begun = self._redacting.submit(work, *args, **kwargs)
        except RuntimeError as error:
            raise StoreUnavailable("the store is closed") from error
        return await asyncio.wrap_future(begun)

    async def redacted_messages(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as they may be stored."""
        if self.redactor.is_short(messages):
            return self.redactor.messages(messages, takes_turns=False)
        return await self.redact(self.redactor.messages, messages)

    async def redacted_turn(self, turn: CapturedTurn, scope: str) -> CapturedTurn:
        """The turn as it may be stored; one that was searched before is unchanged."""
        if self.redactor.is_done(turn):
            return turn
        if self.redactor.is_short(turn.messages, turn.response, turn.tools, turn.request_echo):
            return self.redactor.turn(turn, scope, takes_turns=False)
        return await self.redact(self.redactor.turn, turn, scope)

    async def vacuum(self) -> None:
        """PostgreSQL: free the space of deleted rows, so that it is overwritten, in indexes, too,
        where a server by itself leaves a few deleted names and words. It reads each index once and
        keeps nobody from writing.
        """
        connections = readers(self.config.patient())
        statement = text("VACUUM (INDEX_CLEANUP ON)")
        try:
            await connections.run(lambda connection: connection.execute(statement))
        finally:
            await connections.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def write(
        self, operation: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run an operation in a transaction; its result once that is committed.

        Raises what the operation raises, and as `GroupWriter.run`. Its fail points have its name,
        without `_op`.
        """
        return await self.writer.run(
            lambda connection: operation(connection, *args, **kwargs),
            operation.__name__.removesuffix("_op"),
        )

    async def read(
        self, query: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a query on its own connection: twice, if that connection turns out to be dead.

        Raises what the query raises, StoreUnavailable, and StoreSchemaError if the schema is no
        longer this program's.
        """
        for attempt in range(_READ_ATTEMPTS):
            try:
                return await self.readers.run(lambda connection: query(connection, *args, **kwargs))
            except (SQLAlchemyError, OSError) as error:
                if is_of_schema(error):
                    told = await self.readers.run(lambda one, told=error: problem_of(one, told))
                    raise as_store_error(told) from error
                # A pooled connection may have died since its last use; a second one is new.
                if not is_transient(error) or attempt + 1 == _READ_ATTEMPTS:
                    raise as_store_error(error) from error
        raise AssertionError("the last attempt returns or raises")
