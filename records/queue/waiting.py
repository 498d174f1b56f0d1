"""Which waiting turns a worker takes, and which of them need not be taken any more.

The newest live turns go first: the older a turn, the less it can still teach, and if there are more
than can be judged, old ones would keep every new one waiting until it is as old as they are. Turns
of recordings do not age: they keep their order. Live turns that can no longer train are let go
(`let_go_op`): those that no judge saw wait as `over_capacity`, in last place, for a judge with
nothing else to do, which asks only for their hint.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Connection,
    Row,
    Select,
    UnaryExpression,
    bindparam,
    func,
    or_,
    select,
    update,
)
from sqlalchemy.orm import aliased

from records.names import DropReason, TurnState
from records.queue.freshness import Horizon
from records.queue.round_robin import (
    HINT_ONLY_PRIORITY,
    LIVE_PRIORITY,
    PRIORITIES,
    Taken,
    ceil_div,
    deal,
    flat,
    ring_statement,
    scope_ring,
    scopes_along,
    waiting,
)
from records.tables.models import TurnRow
from records.tables.sql import chunks
from records.turns.recording import REPLAY_PRIORITY

CLAIMABLE = (TurnState.JUDGING, TurnState.SCORING)
WINDOW = 4
"""A claim looks at this many times a scope's share of turns, to keep sessions together."""
LET_GO_AT_A_TIME = 1000
"""Maximum turns that one transaction lets go: others wait for the write lock meanwhile."""
_LATE_STATES = (TurnState.JUDGING, TurnState.DROPPED)
"""The states of turns of `HINT_ONLY_PRIORITY`: claimed once already, or not yet."""


_NOW = bindparam("now")
# Made once: to make a statement takes ten times as long as to run it, and idle workers ask often.


@cache
def _any_free(state: TurnState) -> Select[str]:
    waits = (TurnRow.state == state, TurnRow.priority.in_(PRIORITIES), is_free(_NOW))
    return select(TurnRow.turn_id).where(*waits).limit(1)


@cache
def _any_late() -> Select[str]:
    is_late = TurnRow.state.in_(_LATE_STATES), TurnRow.priority == HINT_ONLY_PRIORITY
    return select(TurnRow.turn_id).where(*is_late, is_free(_NOW)).limit(1)


@cache
def _ring_of_free(state: TurnState, priority: int, is_after: bool) -> Select[str]:
    waits = waiting(state, priority, lambda row: is_free(_NOW, row))
    return ring_statement(TurnRow, waits, is_after=is_after)


@cache
def _free_turns(state: TurnState, priority: int, has_oldest: bool) -> Select[str, str, str]:
    conditions = [
        TurnRow.state == state,
        TurnRow.priority == priority,
        TurnRow.scope == bindparam("scope"),
        is_free(_NOW),
    ]
    if has_oldest:
        oldest = bindparam("oldest")
        conditions.append(or_(TurnRow.oldest_version.is_(None), TurnRow.oldest_version >= oldest))
    return (
        select(TurnRow.turn_id, TurnRow.session_id, TurnRow.scope)
        .where(*conditions)
        .order_by(*order_of(priority))
        .limit(bindparam("most"))
        .with_for_update(skip_locked=True)
    )


def any_free(connection: Connection, state: TurnState, now: float) -> bool:
    """Whether a claim would find a turn: idle workers ask this without taking a write lock."""
    return connection.scalar(_any_free(state), {"now": now}) is not None


def any_late(connection: Connection, now: float) -> bool:
    """Whether a turn waits to be judged for its hint alone."""
    return connection.scalar(_any_late(), {"now": now}) is not None


def is_free(now: float | BindParameter[Any], row: type[TurnRow] = TurnRow) -> ColumnElement[bool]:
    """Whether nobody holds the turn."""
    return or_(row.claim_until.is_(None), row.claim_until < now)


def claim_op(
    connection: Connection,
    state: TurnState,
    owner: str,
    limit: int,
    now: float,
    ttl_s: float,
    after: str = "",
    oldest_version: int | None = None,
) -> Taken:
    """Claim up to `limit` turns of `state`: live ones first, then those of recordings; round robin
    by scope, starting after the scope `after`; in a scope, the session with the newest turn first.

    With `oldest_version` only live turns without a token of an older version.
    """
    chosen: list[tuple[str, str]] = []
    for priority in PRIORITIES:
        left = limit - len(chosen)
        if left:
            oldest = oldest_version if priority == LIVE_PRIORITY else None
            chosen += _dealt(connection, state, priority, left, now, after, oldest)
    turn_ids = [turn_id for turn_id, _ in chosen]
    set_claims(connection, turn_ids, owner, now + ttl_s)
    return Taken(turn_ids=turn_ids, last_scope=chosen[-1][1] if chosen else after)


def claim_late_op(
    connection: Connection, owner: str, limit: int, now: float, ttl_s: float, after: str = ""
) -> Taken:
    """Claim up to `limit` turns that were let go unjudged, the newest first: -> judging, for their
    hint alone. Otherwise as `claim_op`.
    """
    chosen: list[tuple[str, str]] = []
    for state in _LATE_STATES:
        left = limit - len(chosen)
        if left:
            chosen += _dealt(connection, state, HINT_ONLY_PRIORITY, left, now, after, None)
    turn_ids = [turn_id for turn_id, _ in chosen]
    for part in chunks(turn_ids):
        connection.execute(
            update(TurnRow)
            .where(TurnRow.turn_id.in_(part))
            .values(
                state=TurnState.JUDGING,
                drop_reason=None,
                drop_detail=None,
                claim_owner=owner,
                claim_until=now + ttl_s,
                updated_at=now,
            )
        )
    return Taken(turn_ids=turn_ids, last_scope=chosen[-1][1] if chosen else after)


def _dealt(
    connection: Connection,
    state: TurnState,
    priority: int,
    limit: int,
    now: float,
    after: str,
    oldest_version: int | None,
) -> list[tuple[str, str]]:
    """(turn id, scope) of up to `limit` free turns, dealt scope by scope."""
    scopes = scopes_along(
        connection, partial(_ring_of_free, state, priority), after, limit, now=now
    )
    depth = WINDOW * ceil_div(limit, max(len(scopes), 1))
    queues = [
        _by_session(_window(connection, state, priority, one, now, depth, oldest_version))
        for one in scopes
    ]
    return deal(queues, limit)


def _window(
    connection: Connection,
    state: TurnState,
    priority: int,
    scope: str,
    now: float,
    depth: int,
    oldest_version: int | None,
) -> Sequence[Row[str, str, str]]:
    """The free turns of a scope that are to go first."""
    given: dict[str, Any] = {"scope": scope, "now": now, "most": depth}
    if oldest_version is not None:
        given["oldest"] = oldest_version
    statement = _free_turns(state, priority, oldest_version is not None)
    return connection.execute(statement, given).all()


def order_of(priority: int) -> tuple[UnaryExpression[Any], ...]:
    """Turns of recordings oldest first, all others newest first."""
    columns = (TurnRow.created_at, TurnRow.turn_id)
    if priority == REPLAY_PRIORITY:
        return tuple(column.asc() for column in columns)
    return tuple(column.desc() for column in columns)


def _by_session(window: Sequence[Row[str, str, str]]) -> list[tuple[str, str]]:
    """(turn id, scope), turns of one session together."""
    by_session: dict[str, list[tuple[str, str]]] = {}
    for row in window:
        by_session.setdefault(row.session_id, []).append((row.turn_id, row.scope))
    return flat(by_session.values())


def set_claims(
    connection: Connection, turn_ids: Sequence[str], owner: str | None, until: float | None
) -> None:
    """Give these turns to `owner` until `until`; None: to nobody."""
    for part in chunks(turn_ids):
        connection.execute(
            update(TurnRow)
            .where(TurnRow.turn_id.in_(part))
            .values(claim_owner=owner, claim_until=until)
        )


def let_go_op(connection: Connection, state: TurnState, horizon: Horizon, now: float) -> int:
    """Free live turns of `state` that cannot train any more -> dropped; returns how many, at most
    `LET_GO_AT_A_TIME`: judging -> over_capacity, which a judge may judge later; scoring -> stale.
    """
    row = aliased(TurnRow)
    found = _past(state, row, horizon, now).with_only_columns(row.turn_id)
    turn_ids = connection.scalars(found.limit(LET_GO_AT_A_TIME)).all()
    is_judged = state is not TurnState.JUDGING
    return sum(
        connection.execute(
            update(TurnRow)
            # The row itself is checked again: another worker may have claimed it since.
            .where(TurnRow.turn_id.in_(part), TurnRow.state == state, is_free(now))
            .values(
                state=TurnState.DROPPED,
                drop_reason=DropReason.STALE if is_judged else DropReason.OVER_CAPACITY,
                priority=LIVE_PRIORITY if is_judged else HINT_ONLY_PRIORITY,
                claim_owner=None,
                claim_until=None,
                updated_at=now,
            )
        ).rowcount
        for part in chunks(turn_ids)
    )


def any_past(connection: Connection, state: TurnState, horizon: Horizon, now: float) -> bool:
    """Whether there is a turn to let go: asked before the write lock is taken."""
    row = aliased(TurnRow)
    found = _past(state, row, horizon, now).with_only_columns(row.turn_id).limit(1)
    return connection.scalar(found) is not None


def _past(state: TurnState, row: type[TurnRow], horizon: Horizon, now: float) -> Select[Any]:
    """Free live turns with tokens of a version before the horizon's.

    They were answered before that version was made. So each scope's are one range of the index,
    however many newer ones wait.
    """
    ring = scope_ring(state, LIVE_PRIORITY)
    return (
        select(row)
        .select_from(ring)
        .join(row, row.scope == ring.c.scope)
        .where(
            row.state == state,
            row.priority == LIVE_PRIORITY,
            row.created_at < horizon.made_at,
            row.oldest_version < horizon.oldest_version,
            is_free(now, row),
        )
    )


def waiting_since(connection: Connection, state: TurnState) -> float | None:
    """When the oldest waiting live turn was answered, in unix seconds; None without any."""
    ring = scope_ring(state, LIVE_PRIORITY)
    row = aliased(TurnRow)
    oldest = (
        select(row.created_at)
        .where(row.state == state, row.priority == LIVE_PRIORITY, row.scope == ring.c.scope)
        .order_by(row.created_at)
        .limit(1)
        .scalar_subquery()
    )
    return connection.scalar(select(func.min(oldest)).select_from(ring))
