"""Operations on sessions: find or create, note activity, close and reopen.

Functions of a connection, run by the group writer (`*_op`) or a reader. Times are unix seconds.
"""

from __future__ import annotations

from collections.abc import Collection
from uuid import uuid4

from sqlalchemy import Connection, bindparam, select, update

from records.care.deletion import is_deleted
from records.names import DropReason, TurnState
from records.tables.models import SessionRow, TurnRow
from records.tables.sql import chunks, insert_missing, rows_in

TOUCH_EVERY_S = 5.0
"""`last_seen` is rewritten at most this often: exact enough for idle timeouts of minutes."""

_SEEN = select(
    SessionRow.session_id, SessionRow.scope, SessionRow.last_seen, SessionRow.closed_at
).where(SessionRow.session_id.in_(bindparam("values", expanding=True)))

_OPEN = select(SessionRow.scope, SessionRow.last_seen).where(
    SessionRow.session_id == bindparam("session_id"), SessionRow.closed_at.is_(None)
)
_NAMED = select(SessionRow.session_id).where(
    SessionRow.scope == bindparam("scope"), SessionRow.external_id == bindparam("external_id")
)


def find(connection: Connection, session_id: str) -> tuple[str, float] | None:
    """(scope, last_seen) of an open session; None if it is unknown or closed."""
    row = connection.execute(_OPEN, {"session_id": session_id}).one_or_none()
    return None if row is None else (row.scope, row.last_seen)


def find_external(connection: Connection, scope: str, external_id: str) -> str | None:
    """The session that a client named `external_id`."""
    return connection.scalar(_NAMED, {"scope": scope, "external_id": external_id})


def ensure_op(
    connection: Connection, scope: str, external_id: str | None, session_id: str | None, now: float
) -> str:
    """Create the session or note that it was seen.

    Raises ValueError for a session of another scope, and for one that was deleted.
    """
    wanted = session_id or uuid4().hex
    if session_id is not None and is_deleted(connection, session_id):
        raise ValueError(f"session {session_id!r} was deleted")
    if external_id is not None:
        wanted = find_external(connection, scope, external_id) or wanted
    insert_missing(
        connection,
        SessionRow,
        [
            {
                "session_id": wanted,
                "scope": scope,
                "external_id": external_id,
                "created_at": now,
                "last_seen": now,
            }
        ],
    )
    if external_id is not None:
        # Another process may have created it between the lookup and the insert.
        wanted = find_external(connection, scope, external_id) or wanted
    touch_op(connection, [(wanted, scope)], now)
    return wanted


def touch_op(connection: Connection, seen: Collection[tuple[str, str]], now: float) -> None:
    """Note activity in sessions, given as (session id, scope), and reopen them.

    Raises ValueError if a scope has no such session.
    """
    rows = {
        row.session_id: row
        for row in rows_in(connection, _SEEN, (session_id for session_id, _ in seen))
    }
    for session_id, scope in seen:
        if session_id not in rows or rows[session_id].scope != scope:
            raise ValueError(f"no session {session_id!r} in this scope")
    outdated = [
        row.session_id
        for row in rows.values()
        if row.closed_at is not None or row.last_seen < now - TOUCH_EVERY_S
    ]
    for part in chunks(sorted(outdated)):
        connection.execute(
            update(SessionRow)
            .where(SessionRow.session_id.in_(part))
            .values(last_seen=now, closed_at=None, close_reason=None)
        )


def close_op(connection: Connection, session_ids: list[str], reason: str, now: float) -> int:
    """Close sessions; their turns without a next state are dropped. Returns the number of dropped
    turns.
    """
    connection.execute(
        update(SessionRow)
        .where(SessionRow.session_id.in_(session_ids), SessionRow.closed_at.is_(None))
        .values(closed_at=now, close_reason=reason)
    )
    return connection.execute(
        update(TurnRow)
        .where(TurnRow.session_id.in_(session_ids), TurnRow.state == TurnState.AWAITING_NEXT_STATE)
        .values(
            state=TurnState.DROPPED,
            drop_reason=DropReason.NO_NEXT_STATE,
            drop_detail=reason,
            updated_at=now,
        )
    ).rowcount


def idle(connection: Connection, before: float, limit: int) -> list[str]:
    """Open sessions not seen since `before`, longest idle first."""
    return list(
        connection.scalars(
            select(SessionRow.session_id)
            .where(SessionRow.closed_at.is_(None), SessionRow.last_seen < before)
            .order_by(SessionRow.last_seen)
            .limit(limit)
        )
    )


def close_idle_op(connection: Connection, before: float, limit: int, now: float) -> tuple[int, int]:
    """Close up to `limit` idle sessions; returns (sessions closed, turns dropped)."""
    session_ids = idle(connection, before, limit)
    if not session_ids:
        return 0, 0
    return len(session_ids), close_op(connection, session_ids, "idle", now)
