"""Reading a whole store: sessions in the order in which they began, each as it was at one moment.

It formats nothing. What is being deleted is left out: turns dropped as `forgotten` are not part of
a session here. Turns are read with `whole_turns`, a few at a time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, func, or_, select, text, tuple_
from sqlalchemy.exc import SQLAlchemyError

from records.database.writer import as_store_error
from records.names import DropReason, TurnState
from records.outcomes.rows import OutcomeRow
from records.store import Store
from records.tables.models import SessionRow, TurnRow

_SESSIONS_PER_PAGE = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which sessions: seen since `since` (unix seconds), with this id or client-given name; by
    default all. `states`: only turns in one of these; empty: in any.
    """

    since: float | None = None
    session: str | None = None
    states: frozenset[TurnState] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionHeader:
    """A session without its turns. Times are unix seconds."""

    session_id: str
    name: str | None
    created_at: float
    last_seen: float
    close_reason: str | None
    outcome: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPlace:
    """Where a turn stands in its session: `position` counts all turns, parents before children.

    `parent_id` is None if the parent is in another session, or deleted.
    """

    turn_id: str
    parent_id: str | None
    position: int
    state: TurnState


SessionReader = Callable[[Connection, SessionHeader], None]


async def num_sessions(store: Store, wanted: Wanted) -> int:
    """How many sessions there are to read."""
    return await store.read(_count, wanted=wanted)


async def read_sessions(
    store: Store, wanted: Wanted, reader: SessionReader
) -> AsyncIterator[SessionHeader]:
    """Call `reader` with each session and a connection that shows the store as it was when reading
    the session began; yields each session after that. Raises StoreUnavailable.
    """
    after: SessionHeader | None = None
    while page := await store.read(_page, wanted=wanted, after=after):
        for session in page:
            await at_one_moment(store, lambda connection, one=session: reader(connection, one))
            yield session
        after = page[-1]


async def at_one_moment(store: Store, read: Callable[[Connection], None]) -> None:
    """Call `read` once, with a connection whose reads all see one moment.

    It may write to files, so unlike the store's own reads it is never retried.
    """
    try:
        await store.readers.run(lambda connection: _frozen(connection, read))
    except (SQLAlchemyError, OSError) as error:
        if isinstance(error, OSError) and not isinstance(error, ConnectionError | TimeoutError):
            raise  # of the file that is written
        raise as_store_error(error) from error


def _frozen(connection: Connection, read: Callable[[Connection], None]) -> None:
    with _one_moment(connection):
        read(connection)


@contextmanager
def _one_moment(connection: Connection) -> Iterator[None]:
    """Readers commit each statement separately, so the transaction is opened by hand."""
    is_sqlite = connection.dialect.name == "sqlite"
    begin = "BEGIN" if is_sqlite else "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY"
    connection.execute(text(begin))
    try:
        yield
    finally:
        connection.execute(text("ROLLBACK"))


def conditions(wanted: Wanted) -> list[ColumnElement[bool]]:
    """What a row of `sessions` must satisfy."""
    found: list[ColumnElement[bool]] = []
    if wanted.since is not None:
        found.append(SessionRow.last_seen >= wanted.since)
    if wanted.session is not None:
        found.append(
            or_(SessionRow.session_id == wanted.session, SessionRow.external_id == wanted.session)
        )
    return found


def _count(connection: Connection, wanted: Wanted) -> int:
    statement = select(func.count()).select_from(SessionRow).where(*conditions(wanted))
    return connection.execute(statement).scalar_one()


def _page(
    connection: Connection, wanted: Wanted, after: SessionHeader | None
) -> list[SessionHeader]:
    statement = (
        select(
            SessionRow.session_id,
            SessionRow.external_id.label("name"),
            SessionRow.created_at,
            SessionRow.last_seen,
            SessionRow.close_reason,
            OutcomeRow.value.label("outcome"),
        )
        .outerjoin(OutcomeRow, OutcomeRow.session_id == SessionRow.session_id)
        .where(*conditions(wanted))
    )
    key = tuple_(SessionRow.created_at, SessionRow.session_id)
    if after is not None:
        statement = statement.where(key > tuple_(after.created_at, after.session_id))
    statement = statement.order_by(SessionRow.created_at, SessionRow.session_id)
    rows = connection.execute(statement.limit(_SESSIONS_PER_PAGE))
    return [SessionHeader(**row._mapping) for row in rows]


def places(connection: Connection, session_id: str) -> list[TurnPlace]:
    """The turns of a session in the order in which they were recorded, parents before children."""
    rows = connection.execute(
        select(TurnRow.turn_id, TurnRow.parent_turn_id, TurnRow.state)
        .where(
            TurnRow.session_id == session_id,
            TurnRow.drop_reason.is_(None) | (TurnRow.drop_reason != DropReason.FORGOTTEN),
        )
        .order_by(TurnRow.created_at, TurnRow.turn_id)
    ).all()
    states = {row.turn_id: row.state for row in rows}
    order = parents_first([(row.turn_id, row.parent_turn_id) for row in rows])
    return [
        TurnPlace(turn_id=turn_id, parent_id=parent, position=position, state=states[turn_id])
        for position, (turn_id, parent) in enumerate(order)
    ]


def parents_first(turns: Sequence[tuple[str, str | None]]) -> list[tuple[str, str | None]]:
    """(turn, parent) in their order, a parent moved before its first child (clocks of several hosts
    differ); the parent is None if it is not among the turns.
    """
    parents = dict(turns)
    placed: dict[str, str | None] = {}
    for turn_id in parents:
        waiting = [turn_id]
        while (above := parents[waiting[-1]]) in parents and above not in placed:
            waiting.append(above)
        for one in reversed(waiting):
            above = parents[one]
            placed.setdefault(one, above if above in parents else None)
    return list(placed.items())
