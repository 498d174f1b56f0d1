"""What a run looks like from its store: counts, drop reasons, votes, examples for a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, and_, exists, func, or_, select

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
from records.tables.totals import Total, totals, turn_totals
from records.training.step_results import StoredSample, stored_sample
from records.types import Score, TurnRecord, Verdict, Vote

_VERSIONS = 8

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
    sample: StoredSample


def counts(connection: Connection) -> dict[TurnState, int]:
    """Number of turns in each state, zeros included."""
    found = dict.fromkeys(TurnState, 0)
    for one in turn_totals(connection):
        found[one.state] += one.number
    return found


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
    found: Counter[DropReason] = Counter()
    for one in turn_totals(connection):
        if one.state is TurnState.DROPPED and one.drop_reason is not None:
            found[one.drop_reason] += one.number
    return dict(sorted(found.items(), key=lambda kind: (-kind[1], kind[0].value)))


def judged_share(connection: Connection) -> float | None:
    """Share of judged turns among those that were judged or were let go unjudged; None while none
    was let go.
    """
    let_go = sum(
        one.number
        for one in turn_totals(connection)
        if one.state is TurnState.DROPPED and one.priority == HINT_ONLY_PRIORITY
    )
    if not let_go:
        return None
    judged, _ = num_judged(connection)
    return judged / (judged + let_go)


def num_sessions(connection: Connection) -> int:
    """Number of sessions. Their keys are counted: not for what is asked often."""
    return connection.scalar(select(func.count()).select_from(SessionRow)) or 0


def num_judged(connection: Connection) -> tuple[int, int]:
    """Number of turns with a verdict, and number of those whose verdict has a hint."""
    verdicts = totals(connection).get("verdict", Total())
    return verdicts.num_rows, verdicts.num_first


def vote_summary(connection: Connection) -> VoteSummary:
    """Sums over all votes and verdicts."""
    found = totals(connection)
    none, positive, negative = (found.get(f"vote:{one}", Total()) for one in ("none", 1, -1))
    votes = [total for name, total in found.items() if name.startswith("vote:")]
    verdicts = found.get("verdict", Total())
    hints = verdicts.num_first
    return VoteSummary(
        votes_none=none.num_rows,
        votes_pos=positive.num_rows,
        votes_neg=negative.num_rows,
        accepted=hints,
        accept_rate=hints / verdicts.num_rows if verdicts.num_rows else None,
        mean_hint_chars=verdicts.sum_first / hints if hints else None,
        prompt_tokens=_sum((one.num_first, one.sum_first) for one in votes),
        completion_tokens=_sum((one.num_second, one.sum_second) for one in votes),
    )


def _sum(measured: Iterable[tuple[int, int]]) -> int | None:
    """The sum of (number, sum) pairs; None if nothing was measured."""
    pairs = list(measured)
    return sum(amount for _, amount in pairs) if any(number for number, _ in pairs) else None


def mean_score_latency(connection: Connection) -> float | None:
    """Mean seconds of a teacher's call over all stored scores; None without any."""
    scores = totals(connection).get("score", Total())
    return scores.sum_first / scores.num_first / 1e6 if scores.num_first else None


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


def example_turns(
    connection: Connection, limit: int, one_per_version: bool = False
) -> list[ExampleTurn]:
    """The newest turns that were trained under a hint, with their samples, newest first;
    `one_per_version`: of each version only the newest.
    """
    samples = _newest_samples(connection, limit, one_per_version)
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
                sample=stored_sample(row),
            )
        )
    return examples


def _newest_samples(connection: Connection, limit: int, one_per_version: bool) -> list[Any]:
    """Samples that turns were trained with last, under a hint: a few versions at a time, since
    SQLite would sort all of them.
    """
    chosen: list[tuple[str, int]] = []
    versions = select(SampleRow.version).distinct().order_by(SampleRow.version.desc())
    some = connection.scalars(versions.limit(_VERSIONS)).all()
    while some and len(chosen) < limit:
        found = connection.execute(
            select(SampleRow.turn_id, SampleRow.version, TurnRow.state)
            .join(TurnRow, TurnRow.turn_id == SampleRow.turn_id)
            .where(
                SampleRow.version.in_(some),
                TurnRow.trained_version == SampleRow.version,
                exists().where(ScoreRow.turn_id == SampleRow.turn_id),
            )
            .order_by(SampleRow.version.desc(), TurnRow.created_at.desc(), SampleRow.turn_id)
        )
        trained = [(row.turn_id, row.version) for row in found if row.state is TurnState.TRAINED]
        if one_per_version:
            first = {version: turn_id for turn_id, version in reversed(trained)}
            trained = [(first[version], version) for version in sorted(first, reverse=True)]
        chosen += trained
        older = versions.where(SampleRow.version < some[-1])
        some = connection.scalars(older.limit(_VERSIONS)).all()
    return [
        connection.execute(
            select(SampleRow.__table__).where(
                SampleRow.turn_id == turn_id, SampleRow.version == version
            )
        ).one()
        for turn_id, version in chosen[:limit]
    ]


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
