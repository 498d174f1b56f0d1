"""What is known about the turns of one session: the facts that explain why each is where it is. It
only reads; wording is done elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, func, select, true, tuple_

from records.care.deletion import find_sessions
from records.feedback.feedback import KeptFeedback, kept_on
from records.lessons.reading import outcomes_at
from records.messages import EchoChange, echo_changes_of
from records.names import DropReason, TurnState, TurnType
from records.outcomes.rows import OutcomeRow, OutcomeSource, TurnValueRow
from records.reading.summary import counts, drops
from records.tables.models import SessionRow, TurnRow, VerdictRow, VoteRow
from records.tables.sql import chunks
from records.training.batches import awaits_practice


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteFacts:
    """How the judge voted on a turn: the number of votes of each kind."""

    positive: int = 0
    negative: int = 0
    abstained: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFacts:
    """Where one turn stands. Times are unix seconds; a claim may have expired."""

    turn_id: str
    created_at: float
    turn_type: TurnType
    state: TurnState
    drop_reason: DropReason | None
    drop_detail: str | None
    claim_owner: str | None
    claim_until: float | None
    trained_version: int | None
    times_trained: int
    times_left: int
    has_next_state: bool
    echo_changes: tuple[EchoChange, ...]
    finish_reason: str
    hint: str | None
    reward: float | None
    worth: float | None
    """What the turn was worth before it was answered, from 0 to 1; None: not measured."""
    votes: VoteFacts | None
    feedback: tuple[KeptFeedback, ...]
    updated_at: float
    awaits_practice: bool
    """Whether its hint is to be examined, or to have its first lesson."""
    lessons: dict[str, int]
    """What became of lessons that were practised at this turn's state; see `outcomes_at`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeFacts:
    """A session's outcome, in [0, 1], and who gave it. `value` is None while a verifier is asked,
    and if it gave up (`failure`).
    """

    value: float | None
    source: OutcomeSource
    reason: str | None
    failure: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFacts:
    """A session and its turns, oldest first. `outcome` is None if nobody has given one."""

    session_id: str
    name: str | None
    scope: str
    last_seen: float
    closed_at: float | None
    close_reason: str | None
    turns: tuple[TurnFacts, ...]
    outcome: OutcomeFacts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a turn is compared with: numbers of turns of the whole run."""

    states: dict[TurnState, int]
    drops: dict[DropReason, int]


def run_facts(connection: Connection) -> RunFacts:
    """The numbers of the run."""
    return RunFacts(states=counts(connection), drops=drops(connection))


def sessions_named(connection: Connection, session: str) -> list[SessionFacts]:
    """The sessions with this id, or this client-given name: one in each scope that uses it."""
    named = find_sessions(connection, session=session)
    found = [_session(connection, session_id, true(), None) for session_id in named]
    return [one for one in found if one is not None]


def session_of_turn(connection: Connection, turn_id: str) -> SessionFacts | None:
    """A turn's session with this turn alone; None if there is no such turn."""
    session_id = connection.scalar(select(TurnRow.session_id).where(TurnRow.turn_id == turn_id))
    if session_id is None:
        return None
    return _session(connection, session_id, TurnRow.turn_id == turn_id, None)


def session_part(
    connection: Connection, session_id: str, after: str | None, limit: int
) -> SessionFacts | None:
    """A session with `limit` of its turns, starting after the turn `after`; None if there is no
    such session, or it has no such turn.
    """
    where: ColumnElement[bool] = true()
    if after is not None:
        found = select(TurnRow.created_at, TurnRow.turn_id).where(
            TurnRow.turn_id == after, TurnRow.session_id == session_id
        )
        row = connection.execute(found).one_or_none()
        if row is None:
            return None
        place = tuple_(row.created_at, row.turn_id)
        where = tuple_(TurnRow.created_at, TurnRow.turn_id) > place
    return _session(connection, session_id, where, limit)


def _session(
    connection: Connection,
    session_id: str,
    where: ColumnElement[bool],
    limit: int | None,
) -> SessionFacts | None:
    row = connection.execute(
        select(SessionRow.__table__).where(SessionRow.session_id == session_id)
    ).one_or_none()
    if row is None:
        return None
    return SessionFacts(
        session_id=session_id,
        name=row.external_id,
        scope=row.scope,
        last_seen=row.last_seen,
        closed_at=row.closed_at,
        close_reason=row.close_reason,
        turns=tuple(_turns(connection, session_id, where, limit)),
        outcome=_outcome(connection, session_id),
    )


def _outcome(connection: Connection, session_id: str) -> OutcomeFacts | None:
    row = connection.execute(
        select(
            OutcomeRow.value,
            OutcomeRow.source,
            OutcomeRow.reason,
            OutcomeRow.failure,
        ).where(OutcomeRow.session_id == session_id)
    ).one_or_none()
    return None if row is None else OutcomeFacts(**row._mapping)


def _turns(
    connection: Connection,
    session_id: str,
    where: ColumnElement[bool],
    limit: int | None,
) -> list[TurnFacts]:
    rows = connection.execute(
        select(
            TurnRow.turn_id,
            TurnRow.created_at,
            TurnRow.turn_type,
            TurnRow.state,
            TurnRow.drop_reason,
            TurnRow.drop_detail,
            TurnRow.claim_owner,
            TurnRow.claim_until,
            TurnRow.trained_version,
            TurnRow.times_trained,
            TurnRow.times_left,
            TurnRow.next_state.is_not(None).label("has_next_state"),
            TurnRow.echo_changes,
            TurnRow.finish_reason,
            VerdictRow.hint,
            VerdictRow.reward,
            TurnValueRow.value.label("worth"),
            TurnRow.updated_at,
            awaits_practice(TurnRow).label("awaits_practice"),
        )
        .outerjoin(VerdictRow, VerdictRow.turn_id == TurnRow.turn_id)
        .outerjoin(TurnValueRow, TurnValueRow.turn_id == TurnRow.turn_id)
        .where(TurnRow.session_id == session_id, where)
        .order_by(TurnRow.created_at, TurnRow.turn_id)
        .limit(limit)
    ).all()
    turn_ids = [row.turn_id for row in rows]
    votes = _votes(connection, turn_ids)
    lessons = outcomes_at(connection, turn_ids)
    said: dict[str, list[KeptFeedback]] = {}
    for one in kept_on(connection, turn_ids):
        said.setdefault(one.turn_id, []).append(one)
    return [
        TurnFacts(
            **{
                **row._mapping,
                "has_next_state": bool(row.has_next_state),
                "awaits_practice": bool(row.awaits_practice),
                "echo_changes": echo_changes_of(row.echo_changes),
            },
            votes=votes.get(row.turn_id),
            feedback=tuple(said.get(row.turn_id, ())),
            lessons=lessons.get(row.turn_id, {}),
        )
        for row in rows
    ]


def _votes(connection: Connection, turn_ids: Sequence[str]) -> dict[str, VoteFacts]:
    found: dict[str, dict[str, int]] = {}
    for part in chunks(turn_ids):
        rows = connection.execute(
            select(VoteRow.turn_id, VoteRow.score, VoteRow.error.is_not(None), func.count())
            .where(VoteRow.turn_id.in_(part))
            .group_by(VoteRow.turn_id, VoteRow.score, VoteRow.error.is_not(None))
        )
        for turn_id, score, has_failed, number in rows:
            what = "positive" if score == 1 else "negative" if score == -1 else "abstained"
            what = "failed" if has_failed else what
            numbers = found.setdefault(turn_id, {})
            numbers[what] = numbers.get(what, 0) + number
    return {turn_id: VoteFacts(**numbers) for turn_id, numbers in found.items()}
