"""Claims of the judge and scoring workers, and the commits that end them.

A claim is an owner and a deadline on a turn. Past the deadline anyone may claim the turn; a commit
counts only while its owner still holds it, so a worker that lost its claim writes nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, insert, or_, select, update

from records.models import ScoreRow, TurnRow, VerdictRow, VoteRow
from records.sql import chunks, upsert
from records.types import DropReason, TurnState, Verdict

CLAIMABLE = (TurnState.JUDGING, TurnState.SCORING)
WINDOW = 4
"""A claim looks at this many times its limit of turns, to keep turns of a session together."""


def any_free(connection: Connection, state: TurnState, now: float) -> bool:
    """Whether a claim would find a turn: idle workers ask this, and take no write lock."""
    statement = select(TurnRow.turn_id).where(TurnRow.state == state, _is_free(now)).limit(1)
    return connection.scalar(statement) is not None


def _is_free(now: float) -> ColumnElement[bool]:
    return or_(TurnRow.claim_until.is_(None), TurnRow.claim_until < now)


def claim_op(
    connection: Connection, state: TurnState, owner: str, limit: int, now: float, ttl_s: float
) -> list[str]:
    """Claim up to `limit` turns of `state`: oldest session first, its turns in order."""
    window = connection.execute(
        select(TurnRow.turn_id, TurnRow.session_id)
        .where(TurnRow.state == state, _is_free(now))
        .order_by(TurnRow.created_at, TurnRow.turn_id)
        .limit(limit * WINDOW)
        .with_for_update(skip_locked=True)
    ).all()
    by_session: dict[str, list[str]] = {}
    for row in window:
        by_session.setdefault(row.session_id, []).append(row.turn_id)
    chosen = [turn_id for turns in by_session.values() for turn_id in turns][:limit]
    _set_claims(connection, chosen, owner, now + ttl_s)
    return chosen


def _set_claims(
    connection: Connection, turn_ids: Sequence[str], owner: str | None, until: float | None
) -> None:
    for part in chunks(turn_ids):
        connection.execute(
            update(TurnRow)
            .where(TurnRow.turn_id.in_(part))
            .values(claim_owner=owner, claim_until=until)
        )


def extend_op(connection: Connection, owner: str, turn_ids: Sequence[str], until: float) -> int:
    """Move the deadline of claims that `owner` still holds; returns how many these are."""
    return _update_held(connection, owner, turn_ids, claim_until=until)


def release_op(connection: Connection, owner: str, turn_ids: Sequence[str]) -> int:
    """Give back claims that `owner` still holds; returns how many these were."""
    return _update_held(connection, owner, turn_ids, claim_owner=None, claim_until=None)


def _update_held(connection: Connection, owner: str, turn_ids: Sequence[str], **values: Any) -> int:
    return sum(
        connection.execute(
            update(TurnRow)
            .where(
                TurnRow.turn_id.in_(part),
                TurnRow.claim_owner == owner,
                TurnRow.state.in_(CLAIMABLE),
            )
            .values(**values)
        ).rowcount
        for part in chunks(turn_ids)
    )


def _leave(
    connection: Connection, owner: str, turn_id: str, states: Sequence[TurnState], **values: Any
) -> bool:
    """Move a held turn out of `states` and end its claim; False if it is not held by `owner`."""
    changed = connection.execute(
        update(TurnRow)
        .where(TurnRow.turn_id == turn_id, TurnRow.claim_owner == owner, TurnRow.state.in_(states))
        .values(claim_owner=None, claim_until=None, **values)
    )
    return changed.rowcount == 1


def verdict_op(
    connection: Connection, owner: str, verdict: Verdict, drop: DropReason | None, now: float
) -> bool:
    """judging -> scoring, or dropped(drop); stores the verdict and its votes."""
    state = TurnState.SCORING if drop is None else TurnState.DROPPED
    if not _leave(
        connection,
        owner,
        verdict.turn_id,
        (TurnState.JUDGING,),
        state=state,
        drop_reason=drop,
        updated_at=now,
    ):
        return False
    row = {
        "turn_id": verdict.turn_id,
        "hint": verdict.hint,
        "selection": verdict.selection,
        "judge": verdict.judge,
        "num_omitted": verdict.num_omitted,
        "created_at": now,
    }
    upsert(connection, VerdictRow, row)
    connection.execute(delete(VoteRow).where(VoteRow.turn_id == verdict.turn_id))
    if verdict.votes:
        connection.execute(insert(VoteRow), vote_rows(verdict))
    return True


def vote_rows(verdict: Verdict) -> list[dict[str, Any]]:
    """The votes of a verdict as rows."""
    return [
        {
            "turn_id": verdict.turn_id,
            "vote_index": vote.index,
            "score": vote.score,
            "hint": vote.hint,
            "text": vote.text,
            "latency_s": vote.latency_s,
            "prompt_tokens": vote.prompt_tokens,
            "completion_tokens": vote.completion_tokens,
            "error": vote.error,
        }
        for vote in verdict.votes
    ]


def score_op(connection: Connection, owner: str, row: dict[str, Any]) -> bool:
    """scoring -> ready; stores the score. One with the same key is replaced."""
    left = _leave(
        connection,
        owner,
        row["turn_id"],
        (TurnState.SCORING,),
        state=TurnState.READY,
        updated_at=row["created_at"],
    )
    if left:
        upsert(connection, ScoreRow, row)
    return left


def hint_hash(hint: str) -> str:
    """The part of a score's key that stands for its hint."""
    return hashlib.sha256(hint.encode("utf-8", "surrogatepass")).hexdigest()


def drop_op(
    connection: Connection, owner: str, turn_id: str, reason: DropReason, detail: str, now: float
) -> bool:
    """judging, scoring or leased -> dropped(reason)."""
    return _leave(
        connection,
        owner,
        turn_id,
        (*CLAIMABLE, TurnState.LEASED),
        state=TurnState.DROPPED,
        drop_reason=reason,
        drop_detail=detail or None,
        updated_at=now,
    )
