"""What a run looks like from its store: counts, drop reasons, votes, examples for a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, and_, case, exists, func, or_, select

from records.names import DropReason, TurnState, TurnType
from records.queue.round_robin import HINT_ONLY_PRIORITY
from records.queue.scores import load_scores
from records.tables.loading import hint_candidates, load_turns
from records.tables.models import (
    SampleRow,
    ScoreRow,
    SessionRow,
    TurnRow,
    VerdictRow,
    VoteRow,
)
from records.tables.sql import chunks
from records.types import UNSCORED, SampleResult, Score, TurnRecord, Verdict, Vote

_RECENT = 10_000
"""Turns among which the newest trained ones are looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteSummary:
    """All votes and verdicts of a store. A mean without any measurement is None."""

    votes_none: int
    votes_pos: int
    votes_neg: int
    accepted: int
    accept_rate: float | None
    mean_hint_chars: float | None
    prompt_tokens: int | None
    completion_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleTurn:
    """A trained turn with everything that led to its step."""

    turn: TurnRecord
    verdict: Verdict | None
    score: Score
    sample: SampleResult
    version: int


def counts(connection: Connection) -> dict[TurnState, int]:
    """Number of turns in each state, zeros included."""
    rows = connection.execute(select(TurnRow.state, func.count()).group_by(TurnRow.state))
    found = {row[0]: row[1] for row in rows}
    return {state: found.get(state, 0) for state in TurnState}


def scopes_of(connection: Connection, turn_ids: Sequence[str]) -> dict[str, str]:
    """The scope of each of these turns that exists."""
    found: dict[str, str] = {}
    for part in chunks(turn_ids):
        statement = select(TurnRow.turn_id, TurnRow.scope).where(TurnRow.turn_id.in_(part))
        found.update((turn_id, scope) for turn_id, scope in connection.execute(statement))
    return found


def turns_since(connection: Connection, since: float) -> int:
    """Number of turns answered since then (unix seconds); only sessions of that time are read."""
    is_recent = or_(
        and_(SessionRow.closed_at.is_(None), SessionRow.last_seen >= since),
        SessionRow.closed_at >= since,
    )
    statement = (
        select(func.count())
        .select_from(TurnRow)
        .join(SessionRow, SessionRow.session_id == TurnRow.session_id)
        .where(is_recent, TurnRow.created_at >= since)
    )
    return connection.scalar(statement) or 0


def drops(connection: Connection) -> dict[DropReason, int]:
    """Number of dropped turns by reason, those that occur, most frequent first."""
    rows = connection.execute(
        select(TurnRow.drop_reason, func.count())
        .where(TurnRow.state == TurnState.DROPPED, TurnRow.drop_reason.is_not(None))
        .group_by(TurnRow.drop_reason)
        .order_by(func.count().desc(), TurnRow.drop_reason)
    )
    return {reason: number for reason, number in rows if reason is not None}


def judged_share(connection: Connection) -> float | None:
    """Share of judged turns among those that were judged or were let go unjudged; None while none
    was let go.
    """
    let_go = connection.scalar(
        select(func.count()).where(
            TurnRow.state == TurnState.DROPPED, TurnRow.priority == HINT_ONLY_PRIORITY
        )
    )
    if not let_go:
        return None
    judged = connection.scalar(select(func.count()).select_from(VerdictRow)) or 0
    return judged / (judged + let_go)


def num_judged(connection: Connection) -> tuple[int, int]:
    """Number of turns with a verdict, and number of those whose verdict has a hint."""
    judged, objections = connection.execute(select(func.count(), func.count(VerdictRow.hint))).one()
    return judged, objections


def vote_summary(connection: Connection) -> VoteSummary:
    """Sums over all votes and verdicts."""
    votes = connection.execute(
        select(
            func.sum(case((VoteRow.score.is_(None), 1), else_=0)).label("none"),
            func.sum(case((VoteRow.score == 1, 1), else_=0)).label("pos"),
            func.sum(case((VoteRow.score == -1, 1), else_=0)).label("neg"),
            func.sum(VoteRow.prompt_tokens).label("prompt"),
            func.sum(VoteRow.completion_tokens).label("completion"),
        )
    ).one()
    verdicts = connection.execute(
        select(
            func.count().label("all"),
            func.count(VerdictRow.hint).label("accepted"),
            func.avg(func.length(VerdictRow.hint)).label("chars"),
        )
    ).one()
    total, accepted = verdicts[0], verdicts[1]
    return VoteSummary(
        votes_none=int(votes.none or 0),
        votes_pos=int(votes.pos or 0),
        votes_neg=int(votes.neg or 0),
        accepted=accepted,
        accept_rate=accepted / total if total else None,
        mean_hint_chars=None if verdicts[2] is None else float(verdicts[2]),
        prompt_tokens=None if votes.prompt is None else int(votes.prompt),
        completion_tokens=None if votes.completion is None else int(votes.completion),
    )


def mean_score_latency(connection: Connection) -> float | None:
    """Mean seconds of a teacher's call over all stored scores; None without any."""
    statement = select(func.avg(ScoreRow.latency_s)).where(ScoreRow.teacher_version != UNSCORED)
    mean = connection.scalar(statement)
    return None if mean is None else float(mean)


def _votes(connection: Connection, turn_ids: Sequence[str]) -> dict[str, tuple[Vote, ...]]:
    found: dict[str, tuple[Vote, ...]] = {}
    for part in chunks(turn_ids):
        rows = connection.execute(
            select(VoteRow.__table__).where(VoteRow.turn_id.in_(part)).order_by(VoteRow.vote_index)
        )
        for row in rows:
            found[row.turn_id] = (*found.get(row.turn_id, ()), _vote(row._mapping))
    return found


def _vote(row: Any) -> Vote:
    fields = {name: row[name] for name in row if name not in ("turn_id", "vote_index")}
    return Vote(index=row["vote_index"], **fields)


def verdict_of(connection: Connection, turn_id: str) -> Verdict | None:
    """The verdict on a turn, with its votes."""
    return verdicts_of(connection, [turn_id]).get(turn_id)


def verdicts_of(connection: Connection, turn_ids: Sequence[str]) -> dict[str, Verdict]:
    """The verdict on each turn that has one, with its votes."""
    votes = _votes(connection, turn_ids)
    found: dict[str, Verdict] = {}
    for part in chunks(turn_ids):
        rows = connection.execute(select(VerdictRow.__table__).where(VerdictRow.turn_id.in_(part)))
        for row in rows:
            found[row.turn_id] = Verdict(
                turn_id=row.turn_id,
                votes=votes.get(row.turn_id, ()),
                hint=row.hint,
                selection=row.selection,
                judge=row.judge,
                num_omitted=row.num_omitted,
                candidates=hint_candidates(row),
                reward=row.reward,
                awaits_outcome=row.awaits_outcome,
            )
    return found


def newest_taught(connection: Connection, teacher: str, limit: int) -> dict[str, str]:
    """The newest turns that were trained under a hint that `teacher` scored, newest first: id ->
    that hint. Only among the _RECENT turns that the newest versions answered, so that it costs no
    more as the store grows. On a cluster, trained turns have no samples here.
    """
    recent = (
        select(TurnRow.turn_id)
        .where(TurnRow.newest_version.is_not(None))
        .order_by(TurnRow.newest_version.desc())
        .limit(_RECENT)
        .subquery()
    )
    rows = connection.execute(
        select(TurnRow.turn_id, ScoreRow.hint)
        .join(recent, recent.c.turn_id == TurnRow.turn_id)
        .join(ScoreRow, ScoreRow.turn_id == TurnRow.turn_id)
        .where(
            TurnRow.state == TurnState.TRAINED,
            ScoreRow.teacher == teacher,
            ScoreRow.candidate == 0,
            ScoreRow.hint != "",
        )
        .order_by(TurnRow.trained_version.desc(), TurnRow.created_at.desc(), TurnRow.turn_id)
        .limit(limit)
    )
    return {row.turn_id: row.hint for row in rows}


def example_turns(connection: Connection, limit: int) -> list[ExampleTurn]:
    """The newest turns that were trained under a hint, with their samples, newest first."""
    samples = connection.execute(
        select(SampleRow.__table__)
        .join(TurnRow, TurnRow.turn_id == SampleRow.turn_id)
        .where(
            TurnRow.state == TurnState.TRAINED,
            TurnRow.trained_version == SampleRow.version,
            exists().where(ScoreRow.turn_id == SampleRow.turn_id),
        )
        .order_by(SampleRow.version.desc(), TurnRow.created_at.desc(), SampleRow.turn_id)
        .limit(limit)
    ).all()
    turn_ids = [row.turn_id for row in samples]
    turns = load_turns(connection, turn_ids)
    scores = load_scores(connection, turn_ids)
    examples = []
    for row, turn in zip(samples, turns, strict=True):
        examples.append(
            ExampleTurn(
                turn=turn,
                verdict=verdict_of(connection, row.turn_id),
                score=scores[row.turn_id],
                sample=SampleResult(
                    turn_id=row.turn_id,
                    staleness=row.staleness,
                    advantage_mean=row.advantage_mean,
                    advantage_abs_max=row.advantage_abs_max,
                    advantages=row.advantages,
                ),
                version=row.version,
            )
        )
    return examples


def hinted_turn_ids(connection: Connection) -> list[str]:
    """Main turns whose verdict has a hint, oldest first; without those whose hint a person
    rejected, or has yet to see.
    """
    statement = (
        select(TurnRow.turn_id)
        .join(VerdictRow, VerdictRow.turn_id == TurnRow.turn_id)
        .where(
            VerdictRow.hint != "",
            TurnRow.turn_type == TurnType.MAIN,
            TurnRow.state != TurnState.REVIEWING,
            TurnRow.drop_reason.is_distinct_from(DropReason.REVIEW_REJECTED),
        )
        .order_by(TurnRow.created_at, TurnRow.turn_id)
    )
    return list(connection.scalars(statement))
