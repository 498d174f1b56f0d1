"""New outcomes: kept once for each session, and read as part of its last turn's next state.

Nobody writes to an agent after its last answer, so that turn has nothing to be judged by. The
outcome fills this gap: the turn goes to the judge with it, as with feedback.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, Select, bindparam, insert, or_, select, text, update

from records.care.deletion import admit_writer
from records.errors import StoreConflict
from records.feedback.feedback import ROLE
from records.feedback.feedback import counts as feedback_counts
from records.feedback.feedback_writes import MAX_PER_TURN, NewFeedback, add_op
from records.messages import Message
from records.names import REJUDGEABLE, DropReason, TurnState, TurnType
from records.outcomes.rows import OutcomeRow, OutcomeSource
from records.tables.models import SessionRow, TurnRow
from records.tables.sql import rows_in

_LOCK = 7_203_115_064_981_239
"""PostgreSQL: taken to store outcomes, and to drop turns that lack one."""
_OF_SESSIONS = select(OutcomeRow.session_id, OutcomeRow.value, OutcomeRow.covers_until).where(
    OutcomeRow.session_id.in_(bindparam("values", expanding=True)), OutcomeRow.value.is_not(None)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewOutcome:
    """An outcome on its way into the store: `value` in [0, 1], `reason` redacted already.

    `session` is an id or the client's name for it; or `turn_id` is any turn of the session. Raises
    ValueError for a number outside [0, 1].
    """

    scope: str
    value: float
    reason: str | None
    now: float
    session: str | None = None
    turn_id: str | None = None

    def __post_init__(self) -> None:
        check_outcome(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptOutcome:
    """An outcome as it is stored; `is_new` is False if it was already there."""

    session_id: str
    value: float
    source: OutcomeSource
    reason: str | None
    created_at: float
    is_new: bool


def check_outcome(value: float) -> None:
    """Raises ValueError unless it is a number in [0, 1]."""
    if not (math.isfinite(value) and 0.0 <= value <= 1.0):
        raise ValueError(f"an outcome is a number from 0 to 1, got {value!r}")


def add_outcome_op(connection: Connection, new: NewOutcome) -> KeptOutcome | None:
    """Keep a session's outcome; None if the scope has no such session.

    The same outcome again changes nothing. Raises StoreConflict if the session has another outcome.
    A verifier that is being asked is not waited for: its answer then comes too late.
    """
    admit_writer(connection)
    session_id = session_of(connection, new.scope, session=new.session, turn_id=new.turn_id)
    if session_id is None:
        return None
    alone(connection)
    row = connection.execute(
        select(OutcomeRow.__table__).where(OutcomeRow.session_id == session_id).with_for_update()
    ).one_or_none()
    if row is not None and row.value is not None:
        if row.value != new.value:
            raise StoreConflict(f"session {session_id} already has the outcome {row.value:g}")
        return _kept(row, is_new=False)
    newest = connection.execute(last_turn(session_id)).one_or_none()
    values = {
        "value": new.value,
        "source": OutcomeSource.FEEDBACK,
        "reason": new.reason,
        "failure": None,
        "covers_until": None if newest is None else newest.created_at,
        "claim_owner": None,
        "claim_until": None,
        "created_at": new.now,
    }
    if row is None:
        connection.execute(insert(OutcomeRow), {**values, "session_id": session_id})
    else:
        connection.execute(
            update(OutcomeRow).where(OutcomeRow.session_id == session_id).values(**values)
        )
    reopen(connection, session_id, new.now)
    tell_last_turn(connection, session_id, new.value, new.reason, new.now)
    stored = connection.execute(
        select(OutcomeRow.__table__).where(OutcomeRow.session_id == session_id)
    ).one()
    return _kept(stored, is_new=True)


def alone(connection: Connection) -> None:
    """Keep others from storing an outcome, or dropping turns that lack one, until this transaction
    ends: otherwise a turn that is dropped while its outcome arrives would be lost.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})


def session_of(
    connection: Connection, scope: str, *, session: str | None = None, turn_id: str | None = None
) -> str | None:
    """The id of a session of this scope, by its id, the client's name for it, or any turn of it."""
    if turn_id is not None:
        return connection.scalar(
            select(TurnRow.session_id).where(TurnRow.turn_id == turn_id, TurnRow.scope == scope)
        )
    return connection.scalar(
        select(SessionRow.session_id).where(
            SessionRow.scope == scope,
            or_(SessionRow.session_id == session, SessionRow.external_id == session),
        )
    )


def _kept(row: Row[Any], *, is_new: bool) -> KeptOutcome:
    return KeptOutcome(
        session_id=row.session_id,
        value=row.value,
        source=row.source,
        reason=row.reason,
        created_at=row.created_at,
        is_new=is_new,
    )


def outcome_message(value: float, reason: str | None) -> Message:
    """An outcome as the judge reads it."""
    lines = [f"Outcome of the whole session: {value:g} on a scale from 0 to 1"]
    return {"role": ROLE, "content": "\n".join([*lines, reason] if reason else lines)}


def tell_last_turn(
    connection: Connection, session_id: str, value: float, reason: str | None, now: float
) -> None:
    """Have the session's last answer, to which nobody replied, judged by the outcome."""
    last = connection.execute(last_turn(session_id)).one_or_none()
    if last is None or last.next_state is not None:
        return
    if last.state in (TurnState.LEASED, TurnState.TRAINED):
        return
    if last.drop_reason is not None and last.drop_reason not in REJUDGEABLE:
        return
    if feedback_counts(connection, [last.turn_id]).get(last.turn_id, 0) >= MAX_PER_TURN:
        return
    # Without a score of its own: as a reward the outcome belongs to every turn, not just this one.
    add_op(
        connection,
        NewFeedback(
            scope=last.scope,
            turn_id=last.turn_id,
            external_id=None,
            message=outcome_message(value, reason),
            reward=None,
            now=now,
        ),
    )


def last_turn(session_id: str) -> Select[*tuple[Any, ...]]:
    """The newest turn of a session's conversation, where it stands, and when it was answered."""
    return (
        select(
            TurnRow.turn_id,
            TurnRow.scope,
            TurnRow.state,
            TurnRow.drop_reason,
            TurnRow.next_state,
            TurnRow.created_at,
        )
        .where(TurnRow.session_id == session_id, TurnRow.turn_type == TurnType.MAIN)
        .order_by(TurnRow.created_at.desc(), TurnRow.turn_id.desc())
        .limit(1)
    )


def reopen(connection: Connection, session_id: str, now: float) -> None:
    """Turns that had waited in vain for their session's outcome: -> ready."""
    connection.execute(
        update(TurnRow)
        .where(TurnRow.session_id == session_id, TurnRow.drop_reason == DropReason.NO_OUTCOME)
        .values(state=TurnState.READY, drop_reason=None, drop_detail=None, updated_at=now)
    )


def outcomes_of(
    connection: Connection, session_ids: Iterable[str]
) -> Mapping[str, tuple[float, float]]:
    """The known outcomes of these sessions, and until when they cover turns (unix seconds)."""
    rows = rows_in(connection, _OF_SESSIONS, session_ids)
    return {
        row.session_id: (row.value, row.covers_until)
        for row in rows
        if row.covers_until is not None
    }
