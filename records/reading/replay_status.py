"""Where the turns of recordings stand: shown while a replay runs, summed up at its end."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, case, func, or_, select

from records.names import UNJUDGED, DropReason, TurnState
from records.outcomes.rows import OutcomeRow, OutcomeSource
from records.tables.models import (
    RecordingRow,
    ScoreRow,
    SessionRow,
    TokensRow,
    TurnRow,
    VerdictRow,
    VoteRow,
)
from records.turns.recording import REPLAY_PRIORITY, RecordingKind
from records.turns.sessions import find_external


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayStatus:
    """Counts over the recorded turns, and over the samples that took the place of some.

    `num_judged` recorded turns were judged, and `num_accepted` of them earned a hint. `num_scored`
    turns have a teacher's score, of `scored_tokens` ids (hinted prompt and response) in total.
    """

    num_sessions: int
    num_recorded: int
    num_resampled: int
    states: dict[TurnState, int]
    drops: dict[DropReason, int]
    num_votes: int
    num_votes_recorded: int
    num_judged: int
    num_accepted: int
    num_scored: int
    num_held_out: int
    scored_tokens: int
    num_trained: int
    kinds: dict[RecordingKind, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedHint:
    """A hint on a recorded turn: message `position` of the recorded session `session_name`."""

    session_name: str
    position: int
    hint: str


def replay_status(connection: Connection) -> ReplayStatus:
    """All counts at one moment."""
    of_recordings = TurnRow.priority == REPLAY_PRIORITY
    rows = connection.execute(
        select(TurnRow.state, TurnRow.drop_reason, func.count())
        .where(of_recordings)
        .group_by(TurnRow.state, TurnRow.drop_reason)
    ).all()
    states = dict.fromkeys(TurnState, 0)
    drops: dict[DropReason, int] = {}
    for state, reason, number in rows:
        states[state] += number
        if reason is not None:
            drops[reason] = drops.get(reason, 0) + number
    per_kind = select(RecordingRow.kind, func.count()).group_by(RecordingRow.kind)
    kinds = {row[0]: row[1] for row in connection.execute(per_kind)}
    is_original = RecordingRow.kind != RecordingKind.RESAMPLED
    is_judged = or_(TurnRow.drop_reason.is_(None), TurnRow.drop_reason.not_in(UNJUDGED))
    votes = connection.execute(
        select(func.count(), func.sum(case((VoteRow.latency_s.is_(None), 1), else_=0))).join(
            RecordingRow, RecordingRow.turn_id == VoteRow.turn_id
        )
    ).one()
    judged = connection.execute(
        select(func.count(), func.count(VerdictRow.hint))
        .join(RecordingRow, RecordingRow.turn_id == VerdictRow.turn_id)
        .join(TurnRow, TurnRow.turn_id == VerdictRow.turn_id)
        .where(is_original, is_judged)
    ).one()
    # Hinted prompt: the middle replaces what is between prefix and suffix.
    hinted = ScoreRow.prefix_length + ScoreRow.suffix_length
    middle = func.length(ScoreRow.middle_ids) / 4
    scored = connection.execute(
        select(
            func.count(func.distinct(ScoreRow.turn_id)),
            func.sum(hinted + middle + TokensRow.response_length),
        )
        .join(RecordingRow, RecordingRow.turn_id == ScoreRow.turn_id)
        .join(TokensRow, TokensRow.turn_id == ScoreRow.turn_id)
    ).one()
    return ReplayStatus(
        num_sessions=_count(connection, func.count(func.distinct(TurnRow.session_id))),
        num_recorded=sum(n for kind, n in kinds.items() if kind is not RecordingKind.RESAMPLED),
        num_resampled=kinds.get(RecordingKind.RESAMPLED, 0),
        states=states,
        drops=drops,
        num_votes=votes[0],
        num_votes_recorded=int(votes[1] or 0),
        num_judged=judged[0],
        num_accepted=judged[1],
        num_scored=scored[0],
        num_held_out=drops.get(DropReason.HELD_OUT, 0),
        scored_tokens=int(scored[1] or 0),
        num_trained=states[TurnState.TRAINED],
        kinds=kinds,
    )


def _count(connection: Connection, what: ColumnElement[int]) -> int:
    return connection.scalar(select(what).where(TurnRow.priority == REPLAY_PRIORITY)) or 0


def recorded_turns(connection: Connection, scope: str, name: str) -> dict[int, list[str]]:
    """Position -> turn ids of the recorded session `name`: several if recordings with one name
    differ there.
    """
    # Two lookups by key: PostgreSQL plans them well without statistics of the tables.
    session_id = find_external(connection, scope, name)
    statement = (
        select(RecordingRow.position, TurnRow.turn_id)
        .join(TurnRow, TurnRow.turn_id == RecordingRow.turn_id)
        .where(
            TurnRow.session_id == session_id,
            RecordingRow.kind != RecordingKind.RESAMPLED,
        )
    )
    found: dict[int, list[str]] = {}
    for row in connection.execute(statement):
        found.setdefault(row.position, []).append(row.turn_id)
    return found


def recorded_hints(connection: Connection, limit: int) -> list[RecordedHint]:
    """The hints of the first `limit` recorded turns that earned one, in the order of import."""
    statement = (
        select(SessionRow.external_id, RecordingRow.position, VerdictRow.hint)
        .join(TurnRow, TurnRow.turn_id == VerdictRow.turn_id)
        .join(RecordingRow, RecordingRow.turn_id == VerdictRow.turn_id)
        .join(SessionRow, SessionRow.session_id == TurnRow.session_id)
        .where(VerdictRow.hint.is_not(None), RecordingRow.kind != RecordingKind.RESAMPLED)
        .order_by(TurnRow.created_at, TurnRow.turn_id)
        .limit(limit)
    )
    return [
        RecordedHint(session_name=row.external_id, position=row.position, hint=row.hint)
        for row in connection.execute(statement)
    ]


def has_recorded_outcomes(connection: Connection) -> bool:
    """Whether a recording has an outcome."""
    statement = select(OutcomeRow.session_id).where(OutcomeRow.source == OutcomeSource.RECORDING)
    return connection.execute(statement.limit(1)).first() is not None


def held_out_turns(connection: Connection) -> list[str]:
    """Turns that were scored and kept from training, in order."""
    is_held_out = TurnRow.drop_reason == DropReason.HELD_OUT
    return _ordered(connection, TurnRow.state == TurnState.DROPPED, is_held_out)


def trained_recordings(connection: Connection) -> list[str]:
    """Turns of recordings that were trained on, in order."""
    return _ordered(
        connection, TurnRow.state == TurnState.TRAINED, TurnRow.priority == REPLAY_PRIORITY
    )


def _ordered(connection: Connection, *conditions: ColumnElement[bool]) -> list[str]:
    statement = select(TurnRow.turn_id).where(*conditions)
    return list(connection.scalars(statement.order_by(TurnRow.created_at, TurnRow.turn_id)))
