"""Which sessions a verifier is to be asked about, and what it answers.

A session is over once nothing has happened in it for a while. It is claimed by an owner with a
deadline, like a turn; an outcome that a person or a recording gives meanwhile stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, and_, case, or_, select, update
from sqlalchemy.orm import aliased

from records.care.deletion import admit_writer
from records.names import TurnState, TurnType
from records.outcomes.outcomes import alone, check_outcome, last_turn, reopen, tell_last_turn
from records.outcomes.rows import OutcomeRow, OutcomeSource
from records.outcomes.values import TurnValue, keep_values
from records.tables.models import IS_UNSAID, SessionRow, TurnRow
from records.tables.sql import chunks, insert_missing

_MAY_TRAIN = (
    TurnState.AWAITING_NEXT_STATE,
    TurnState.JUDGING,
    TurnState.REVIEWING,
    TurnState.SCORING,
    TurnState.READY,
)


_LATE_S = 3600.0
"""Turns that were dropped without an outcome longer ago than this are not asked about."""
_NEVER_ANSWERED_S = 900.0
"""An answer is not waited for longer than this; no hold lasts as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToVerify:
    """A session whose outcome is asked for; `last_turn_id` is the end of its conversation, after
    which an unanswered message may have come (`was_followed`).
    """

    session_id: str
    name: str | None
    last_turn_id: str
    was_followed: bool = False

    @property
    def turn_id(self) -> str:
        """The session's id: the claim loop asks for it by this name."""
        return self.session_id


def claim_sessions_op(
    connection: Connection, owner: str, limit: int, idle_before: float, now: float, ttl_s: float
) -> list[ToVerify]:
    """Claim up to `limit` sessions that are over and have a turn that can still train."""
    admit_writer(connection)
    found = _unverified(connection, limit, idle_before, now)
    rows = [
        {
            "session_id": session_id,
            "value": None,
            "source": OutcomeSource.VERIFIER,
            "reason": None,
            "failure": None,
            "covers_until": None,
            "claim_owner": None,
            "claim_until": None,
            "created_at": now,
        }
        for session_id in sorted(found)
    ]
    insert_missing(connection, OutcomeRow, rows)
    claimed: list[ToVerify] = []
    for session_id in sorted(found):
        taken = connection.execute(
            update(OutcomeRow)
            # The row itself is checked again: another worker may have claimed it since.
            .where(OutcomeRow.session_id == session_id, _is_open(now))
            .values(claim_owner=owner, claim_until=now + ttl_s)
        )
        last = connection.execute(last_turn(session_id)).one_or_none()
        if taken.rowcount and last is not None:
            claimed.append(
                ToVerify(
                    session_id=session_id,
                    name=found[session_id],
                    last_turn_id=last.turn_id,
                    was_followed=last.next_state is not None,
                )
            )
    return claimed


def any_unverified(connection: Connection, idle_before: float, now: float) -> bool:
    """Whether a claim would find a session: idle workers ask this without taking a write lock."""
    return bool(_unverified(connection, 1, idle_before, now))


def _unverified(
    connection: Connection, limit: int, idle_before: float, now: float
) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    unsaid = and_(IS_UNSAID, TurnRow.updated_at >= now - _LATE_S)
    for waits in (TurnRow.state.in_(_MAY_TRAIN), unsaid):
        left = limit - len(found)
        if left <= 0:
            break
        statement = (
            select(TurnRow.session_id, SessionRow.external_id)
            .join(SessionRow, SessionRow.session_id == TurnRow.session_id)
            .outerjoin(OutcomeRow, OutcomeRow.session_id == TurnRow.session_id)
            .where(
                waits,
                TurnRow.turn_type == TurnType.MAIN,
                _is_over(idle_before, now),
                or_(OutcomeRow.session_id.is_(None), _is_open(now)),
            )
            .distinct()
            .limit(left)
        )
        found |= {row.session_id: row.external_id for row in connection.execute(statement)}
    return found


def _is_over(idle_before: float, now: float) -> ColumnElement[bool]:
    """Whether a session is over: it was closed, or quiet after its last answer. If a message came
    after that, the next answer is under way, unless it never comes.
    """
    turn = aliased(TurnRow)
    answered = (
        select(case((turn.next_state.is_(None), 1), else_=0))
        .where(turn.session_id == SessionRow.session_id, turn.turn_type == TurnType.MAIN)
        .order_by(turn.created_at.desc(), turn.turn_id.desc())
        .limit(1)
        .scalar_subquery()
    )
    return or_(
        SessionRow.closed_at.is_not(None),
        and_(SessionRow.last_seen < idle_before, answered == 1),
        SessionRow.last_seen < min(idle_before, now - _NEVER_ANSWERED_S),
    )


def _is_open(now: float) -> ColumnElement[bool]:
    return (
        OutcomeRow.value.is_(None)
        & OutcomeRow.failure.is_(None)
        & or_(OutcomeRow.claim_until.is_(None), OutcomeRow.claim_until < now)
    )


def set_claims_op(
    connection: Connection, owner: str, session_ids: Sequence[str], until: float | None
) -> int:
    """Hold these claims of `owner` until `until`; None: give them back. Returns how many."""
    return sum(
        connection.execute(
            update(OutcomeRow)
            .where(
                OutcomeRow.session_id.in_(part),
                OutcomeRow.claim_owner == owner,
                OutcomeRow.value.is_(None),
            )
            .values(claim_owner=None if until is None else owner, claim_until=until)
        ).rowcount
        for part in chunks(session_ids)
    )


def verified_op(
    connection: Connection,
    owner: str,
    claimed: ToVerify,
    value: float,
    reason: str | None,
    now: float,
    values: Sequence[TurnValue] = (),
) -> bool:
    """Store the verifier's answer; False if the claim was lost or there is already an outcome. If
    the session went on meanwhile, the answer no longer fits: the claim is given back.
    """
    check_outcome(value)
    admit_writer(connection)
    alone(connection)
    session_id = claimed.session_id
    last = connection.execute(last_turn(session_id)).one_or_none()
    went_on = last is None or (last.turn_id, last.next_state is not None) != (
        claimed.last_turn_id,
        claimed.was_followed,
    )
    if last is None or went_on:
        set_claims_op(connection, owner, [session_id], None)
        return False
    kept = connection.execute(
        update(OutcomeRow)
        .where(
            OutcomeRow.session_id == session_id,
            OutcomeRow.claim_owner == owner,
            OutcomeRow.value.is_(None),
        )
        .values(
            value=value,
            reason=reason,
            covers_until=last.created_at,
            claim_owner=None,
            claim_until=None,
            created_at=now,
        )
    ).rowcount
    if kept:
        keep_values(connection, values)
        reopen(connection, session_id, now)
        tell_last_turn(connection, session_id, value, reason, now)
    return bool(kept)


def give_up_op(connection: Connection, owner: str, session_id: str, failure: str) -> bool:
    """The verifier is not asked about this session again; False if the claim was lost."""
    given_up = (
        update(OutcomeRow)
        .where(
            OutcomeRow.session_id == session_id,
            OutcomeRow.claim_owner == owner,
            OutcomeRow.value.is_(None),
        )
        .values(failure=failure, claim_owner=None, claim_until=None)
    )
    return connection.execute(given_up).rowcount == 1
