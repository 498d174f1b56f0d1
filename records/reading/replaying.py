"""Importing recorded sessions: as ordinary sessions and turns, which later stages claim as usual.

A session is written whole, in one transaction that may be repeated: what is already there is left
as it is. Votes that come later are added to turns that the judge has not taken up, or that were
dropped without a hint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, bindparam, delete, func, insert, select, update

from records.names import REJUDGEABLE, DropReason, TurnState
from records.outcomes.outcomes import alone, reopen
from records.outcomes.rows import OutcomeRow, OutcomeSource
from records.queue.claims import holds
from records.tables.models import RecordingRow, ReviewRow, TokensRow, TurnRow, VerdictRow
from records.tables.sql import chunks, rows_in, table_of
from records.turns import sessions
from records.turns import turn_writes as turns
from records.turns.recording import RecordingKind
from records.turns.turn_writes import NextState, PreparedTurn

_STORED = select(TurnRow.turn_id).where(TurnRow.turn_id.in_(bindparam("values", expanding=True)))
_WITH_VOTES = (
    select(TurnRow.turn_id, TurnRow.state, TurnRow.drop_reason, RecordingRow.votes)
    .join(RecordingRow, RecordingRow.turn_id == TurnRow.turn_id)
    .where(TurnRow.turn_id.in_(bindparam("values", expanding=True)))
    .order_by(TurnRow.turn_id)
    .with_for_update(of=TurnRow)
)
_SET_VOTES = (
    update(table_of(RecordingRow))
    .where(RecordingRow.turn_id == bindparam("key"))
    .values(votes=bindparam("votes"))
)
_CLOSED_AS = "recorded"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSession:
    """A recorded session as rows: its turns, parents first, and what followed each."""

    session_id: str
    scope: str
    name: str
    now: float
    turns: tuple[PreparedTurn, ...]
    next_states: tuple[NextState, ...]
    outcome: float | None = None
    """Its outcome, in [0, 1], if the recording has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedSession:
    """What became of a recorded session: how many turns are new, and the outcome that it has
    already, if that is another than the recording's; the first one stays.
    """

    num_new: int
    other_outcome: float | None = None


def import_op(connection: Connection, prepared: Sequence[PreparedSession]) -> list[ImportedSession]:
    """Write what is not yet there of each session, closed.

    Raises ValueError for a session of another scope.
    """
    if any(session.outcome is not None for session in prepared):
        alone(connection)  # before any row is locked
    turn_ids = [one.turn["turn_id"] for session in prepared for one in session.turns]
    written = {row.turn_id for row in rows_in(connection, _STORED, turn_ids)}
    depths: dict[str, int] = {}
    levels: list[list[PreparedTurn]] = []
    changed: list[PreparedSession] = []
    added = []
    for session in prepared:
        num_before = len(written)
        for one in session.turns:
            turn_id = one.turn["turn_id"]
            depth = depths.setdefault(turn_id, depths.get(one.turn["parent_turn_id"], -1) + 1)
            if turn_id not in written:
                written.add(turn_id)
                levels += [[] for _ in range(depth + 1 - len(levels))]
                levels[depth].append(one)
        added.append(len(written) - num_before)
        if added[-1]:
            changed.append(session)
            sessions.ensure_op(
                connection, session.scope, session.name, session.session_id, session.now
            )
    for level in levels:  # a turn's parents are checked against the store
        if level:
            turns.record_op(connection, level)
    # Also for sessions without a new turn: their last one may have been answered since.
    if followed := [one for session in prepared for one in session.next_states]:
        turns.set_next_state_op(connection, followed)
    if changed:
        now = max(session.now for session in changed)
        session_ids = [session.session_id for session in changed]
        sessions.close_op(connection, session_ids, _CLOSED_AS, now)
    return [
        ImportedSession(
            num_new=num_new,
            other_outcome=(
                None
                if session.outcome is None
                else _keep_outcome(connection, session, session.outcome)
            ),
        )
        for session, num_new in zip(prepared, added, strict=True)
    ]


def _keep_outcome(connection: Connection, session: PreparedSession, outcome: float) -> float | None:
    """Also if the recording got its outcome, or further turns, after an earlier import. Returns
    another outcome that the session has already: that one stays.
    """
    known = connection.execute(
        select(OutcomeRow.value).where(OutcomeRow.session_id == session.session_id)
    ).one_or_none()
    values = {
        "value": outcome,
        "source": OutcomeSource.RECORDING,
        "reason": None,
        "failure": None,
        # Its turns have their own times, one after the other.
        "covers_until": max(one.turn["created_at"] for one in session.turns),
        "claim_owner": None,
        "claim_until": None,
        "created_at": session.now,
    }
    if known is None:
        connection.execute(insert(OutcomeRow), {**values, "session_id": session.session_id})
    elif known.value in (None, outcome):
        connection.execute(
            update(OutcomeRow).where(OutcomeRow.session_id == session.session_id).values(**values)
        )
    reopen(connection, session.session_id, session.now)
    return None if known is None or known.value in (None, outcome) else known.value


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedVotes:
    """A judge's answers to a recorded turn."""

    turn_id: str
    votes: tuple[str, ...]
    now: float


def votes_op(connection: Connection, imported: Sequence[ImportedVotes]) -> list[bool]:
    """Give recorded turns their votes; a turn that was dropped without a hint is judged again.

    False, and nothing changes, for an unknown turn, one that has these votes, and one that went on.
    """
    wanted = {one.turn_id: one for one in imported}
    found = {row.turn_id: row for row in rows_in(connection, _WITH_VOTES, sorted(wanted))}
    taken = [
        one
        for turn_id, one in wanted.items()
        if turn_id in found
        and found[turn_id].votes != list(one.votes)
        and _takes_votes(found[turn_id])
    ]
    if taken:
        connection.execute(
            _SET_VOTES, [{"key": one.turn_id, "votes": list(one.votes)} for one in taken]
        )
        for part in chunks([one.turn_id for one in taken]):
            connection.execute(delete(ReviewRow).where(ReviewRow.turn_id.in_(part)))
            connection.execute(
                update(TurnRow)
                .where(TurnRow.turn_id.in_(part), TurnRow.next_state.is_not(None))
                .values(
                    state=TurnState.JUDGING,
                    drop_reason=None,
                    drop_detail=None,
                    claim_owner=None,
                    claim_until=None,
                    updated_at=taken[0].now,
                )
            )
    ids = {one.turn_id for one in taken}
    return [one.turn_id in ids for one in imported]


def _takes_votes(row: Any) -> bool:
    return row.state is TurnState.JUDGING or (
        row.state is TurnState.DROPPED and row.drop_reason in REJUDGEABLE
    )


def replace_op(
    connection: Connection, owner: str, turn_id: str, sample: PreparedTurn, is_last: bool
) -> bool:
    """Replace a recorded turn by a sample of the policy, which takes over its verdict.

    The sample -> scoring, unless it is already dropped; with `is_last`, the recorded turn ->
    dropped(resampled), otherwise more samples follow. False, and nothing is written, if the claim
    is lost.
    """
    if not holds(connection, TurnState.SCORING, owner, turn_id):
        return False
    new_id = sample.turn["turn_id"]
    turns.record_op(connection, [sample])
    verdict = connection.execute(
        select(VerdictRow.__table__).where(VerdictRow.turn_id == turn_id)
    ).one()
    row = {**verdict._mapping, "turn_id": new_id, "reward": None, "awaits_outcome": False}
    connection.execute(table_of(VerdictRow).insert(), [row])
    connection.execute(
        update(TurnRow)
        .where(TurnRow.turn_id == new_id, TurnRow.state != TurnState.DROPPED)
        .values(state=TurnState.SCORING)
    )
    if not is_last:
        return True
    connection.execute(
        update(TurnRow)
        .where(TurnRow.turn_id == turn_id)
        .values(
            state=TurnState.DROPPED,
            drop_reason=DropReason.RESAMPLED,
            drop_detail=new_id,
            claim_owner=None,
            claim_until=None,
            updated_at=sample.turn["updated_at"],
        )
    )
    return True


def samples_of(connection: Connection, turn_id: str) -> int:
    """How many samples stand for a recorded turn so far."""
    statement = (
        select(func.count())
        .select_from(TokensRow)
        .join(RecordingRow, RecordingRow.turn_id == TokensRow.turn_id)
        .where(TokensRow.token_parent_id == turn_id, RecordingRow.kind == RecordingKind.RESAMPLED)
    )
    return connection.scalar(statement) or 0
