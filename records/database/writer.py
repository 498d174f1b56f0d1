"""Group commit: one task per process runs the waiting write operations in one transaction.

Callers hand over an operation (a function of a connection) and wait until it is committed. Frequent
operations are written as bulks: one call for the items of all callers of a group. A group runs
without savepoints first; if an operation fails, the group is rolled back and run again with a
savepoint around each, so that a failing operation fails only its caller. Operations may therefore
run several times: they must change nothing but the database.

It does not know what the operations do, only their names: each has a fail point before the commit
of its group and one after it.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

from sqlalchemy import Connection, NestedTransaction
from sqlalchemy.exc import DatabaseError, DBAPIError, OperationalError

from records.database import fail_points
from records.database.database import Transactions, is_ailing, is_conflict, is_transient
from records.errors import StoreUnavailable

T = TypeVar("T")
Item = TypeVar("Item")
Operation: TypeAlias = Callable[[Connection], T]
Bulk: TypeAlias = Callable[[Connection, Sequence[Item]], list[T]]
"""One operation for many callers: takes an item of each and returns as many outcomes, in order."""

_FIRST_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class _Failed:
    error: Exception


@dataclass(frozen=True, slots=True)
class _Waiting:
    bulk: Bulk[Any, Any]
    item: Any
    future: asyncio.Future[Any]
    name: str


class _GroupFailed(Exception):
    """An operation of a group without savepoints raised: the group has to be run with them."""


class GroupWriter:
    """The one writer of a process. Start with `start()`, end with `close()`, which drains it."""

    def __init__(self, transactions: Transactions, *, group_max: int, lock_retries: int) -> None:
        self._transactions = transactions
        self._group_max = group_max
        self._lock_retries = lock_retries
        self._waiting: deque[_Waiting] = deque()
        self._wake = asyncio.Event()
        self._closing = False
        self._task: asyncio.Task[None] | None = None
        self.num_retries = 0
        """Transactions that had to be tried again (locks, deadlocks, lost connections)."""
        self.num_groups = 0
        """Groups committed; operations / groups is the mean group size."""

    def start(self) -> None:
        """Start the writing task in the running event loop."""
        self._task = asyncio.create_task(self._run(), name="store-writer")

    async def close(self) -> None:
        """Commit the waiting operations, then stop. Later operations raise StoreUnavailable."""
        self._closing = True
        self._wake.set()
        if self._task is not None:
            await self._task
        await self._transactions.close()

    async def run(self, operation: Operation[T], name: str = "other") -> T:
        """Run `operation` in a transaction and return its result once that is committed.

        `name` is the name of its fail points. Raises what the operation raises; StoreUnavailable if
        the database stays locked or unavailable. Cancelling a caller while its operation runs does
        not undo it.
        """
        return await self.run_bulk(_one_by_one, operation, name)

    async def run_bulk(self, bulk: Bulk[Item, T], item: Item, name: str) -> T:
        """As `run`, for an operation that does the items of all its callers at once."""
        if self._closing or self._task is None:
            raise StoreUnavailable("the store is closed")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(bulk, item, future, name))
        self._wake.set()
        return await future

    async def _run(self) -> None:
        while True:
            group = self._next_group()
            if not group:
                if self._closing:
                    return
                self._wake.clear()
                await self._wake.wait()
                continue
            outcomes = await self._commit_or_fail(group)
            for waiting, outcome in zip(group, outcomes, strict=True):
                if waiting.future.done():
                    continue
                if isinstance(outcome, _Failed):
                    waiting.future.set_exception(outcome.error)
                else:
                    waiting.future.set_result(outcome)

    def _next_group(self) -> list[_Waiting]:
        group: list[_Waiting] = []
        while self._waiting and len(group) < self._group_max:
            waiting = self._waiting.popleft()
            if not waiting.future.cancelled():
                group.append(waiting)
        return group

    async def _commit_or_fail(self, group: list[_Waiting]) -> list[Any]:
        try:
            return await self._commit(group)
        except Exception as error:  # handed to every caller of the group; the task must live on
            failure = _Failed(as_store_error(error))
            return [failure] * len(group)

    async def _commit(self, group: list[_Waiting]) -> list[Any]:
        for attempt in range(self._lock_retries + 1):
            try:
                return await self._attempt(group)
            except Exception as error:
                if not is_transient(error) or attempt == self._lock_retries:
                    raise
                self.num_retries += 1
                await asyncio.sleep(_FIRST_PAUSE_S * 2**attempt * random.uniform(0.5, 1.5))
                if is_conflict(error) and len(group) > 1:
                    # Groups of two processes that lock the same rows in different orders would
                    # collide again; single operations all lock rows in the same order.
                    return [(await self._commit_or_fail([one]))[0] for one in group]
        raise AssertionError("the last attempt returns or raises")

    async def _attempt(self, group: list[_Waiting]) -> list[Any]:
        try:
            outcomes = await self._transactions.run(partial(_run_plain, group))
        except _GroupFailed:
            outcomes = await self._transactions.run(partial(_run_isolated, group))
        self.num_groups += 1
        _reached(group, "committed")
        return outcomes


def _one_by_one(connection: Connection, operations: Sequence[Operation[T]]) -> list[T]:
    return [operation(connection) for operation in operations]


def _run_plain(group: list[_Waiting], connection: Connection) -> list[Any]:
    outcomes: dict[int, Any] = {}
    positions: dict[Bulk[Any, Any], list[int]] = {}
    for position, waiting in enumerate(group):
        positions.setdefault(waiting.bulk, []).append(position)
    for bulk, chosen in positions.items():
        try:
            results = bulk(connection, [group[position].item for position in chosen])
        except Exception as error:
            if is_transient(error):
                raise
            raise _GroupFailed from error
        outcomes.update(zip(chosen, results, strict=True))
    _reached(group, "uncommitted")
    return [outcomes[position] for position in range(len(group))]


def _run_isolated(group: list[_Waiting], connection: Connection) -> list[Any]:
    outcomes: list[Any] = []
    for waiting in group:
        savepoint = connection.begin_nested()
        try:
            outcomes += waiting.bulk(connection, [waiting.item])
            savepoint.commit()
        except Exception as error:
            if is_transient(error) or not _is_rolled_back(savepoint):
                raise
            # It belongs to the caller of this operation alone.
            outcomes.append(_Failed(as_store_error(error)))
    _reached(group, "uncommitted")
    return outcomes


def _is_rolled_back(savepoint: NestedTransaction) -> bool:
    """False: SQLite has undone the whole transaction, as it may if the disk is full or failing. The
    operations before this one are then not written either.
    """
    try:
        savepoint.rollback()
    except OperationalError:
        return False
    return True


def _reached(group: list[_Waiting], moment: str) -> None:
    if fail_points.ARMED is not None:
        for waiting in group:
            fail_points.reach(f"{waiting.name}.{moment}")


def as_store_error(error: Exception) -> Exception:
    """`error` as its caller should see it: database trouble as StoreUnavailable."""
    # A bare DatabaseError means a file that is not a database, or a damaged one.
    broken = isinstance(error, OperationalError) or type(error) is DatabaseError
    is_ill = isinstance(error, DBAPIError) and is_ailing(error)
    if broken or is_ill or is_transient(error):
        reason = str(error.orig) if isinstance(error, DBAPIError) else str(error)
        unavailable = StoreUnavailable(f"the database is not available: {reason}")
        unavailable.__cause__ = error
        return unavailable
    return error
