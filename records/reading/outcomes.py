"""What became of the newest turns: a few from each of the sessions that were seen last, so that the
cost stays the same however long a run has been going on.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, select

from records.names import DropReason, TurnState, TurnType
from records.tables.models import SessionRow, TurnRow

_SESSIONS = 50
_TURNS = 20
_OF_SESSION = (
    select(
        TurnRow.scope,
        TurnRow.session_id,
        TurnRow.created_at,
        TurnRow.state,
        TurnRow.turn_type,
        TurnRow.drop_reason.label("reason"),
        TurnRow.drop_detail.label("detail"),
    )
    .where(TurnRow.session_id == bindparam("session_id"))
    .order_by(TurnRow.created_at.desc())
    .limit(_TURNS)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOutcome:
    """A turn that was dropped for `reason`, or is on its way or trained (None)."""

    scope: str
    session_id: str
    created_at: float
    reason: DropReason | None
    detail: str | None


def recent_outcomes(connection: Connection) -> list[TurnOutcome]:
    """Those of the newest main turns whose outcome is known, oldest first."""
    newest = SessionRow.last_seen.desc()
    open_ones = select(SessionRow.session_id).where(SessionRow.closed_at.is_(None))
    closed = select(SessionRow.session_id).where(SessionRow.closed_at.is_not(None))
    session_ids = [
        *connection.scalars(open_ones.order_by(newest).limit(_SESSIONS)),
        *connection.scalars(closed.order_by(SessionRow.closed_at.desc()).limit(_SESSIONS)),
    ]
    found = [one for session_id in session_ids for one in _of_session(connection, session_id)]
    return sorted(found, key=lambda one: one.created_at)


def _of_session(connection: Connection, session_id: str) -> list[TurnOutcome]:
    rows = connection.execute(_OF_SESSION, {"session_id": session_id})
    return [
        TurnOutcome(
            scope=row.scope,
            session_id=row.session_id,
            created_at=row.created_at,
            reason=row.reason,
            detail=row.detail,
        )
        for row in rows
        if row.turn_type is TurnType.MAIN and row.state is not TurnState.AWAITING_NEXT_STATE
    ]
