"""New feedback: what becomes of it depends on where its turn stands.

Decided and written in one transaction, with the turn's row locked; the outcome is kept with the
feedback. Also sends a turn whose next state grew after it was judged back to the judge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select, update

from records.care.deletion import admit_writer
from records.errors import StoreConflict
from records.feedback.feedback import KeptFeedback, counts, kept
from records.messages import Message
from records.names import REJUDGEABLE, DropReason, FeedbackOutcome, TurnState
from records.queue.round_robin import late_no_more
from records.tables.columns import content_hash
from records.tables.models import (
    FeedbackRow,
    ReviewRow,
    ScoreRow,
    TurnRow,
    VerdictRow,
    VoteRow,
)

MAX_PER_TURN = 32
"""More is refused: the judge reads all of it."""

_AFTER_READY = frozenset(
    {
        DropReason.STALE,
        DropReason.BEYOND_TRAINER_MEMORY,
        DropReason.ROLLOUT_REJECTED,
        DropReason.NEUTRAL_REWARD,
        DropReason.BELOW_NOISE,
        DropReason.NONFINITE_GRADIENT,
        DropReason.ROUTED_EXPERTS_MISSING,
        DropReason.SAMPLING_WEIGHTS_GONE,
        DropReason.FOREIGN_TOKENS,
    }
)


class TooMuchFeedback(ValueError):
    """A turn already has as much feedback as it may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFeedback:
    """Feedback on its way into the store; `message` is already redacted."""

    scope: str
    turn_id: str
    external_id: str | None
    message: Message
    reward: float | None
    now: float

    @property
    def feedback_id(self) -> str:
        """Equal content on one turn is one feedback."""
        return content_hash([self.turn_id, self.message, self.reward])[:32]


def add_op(connection: Connection, new: NewFeedback) -> KeptFeedback | None:
    """Keep feedback and move its turn accordingly; None if the scope has no such turn.

    Sending it again changes nothing and returns what became of it the first time. Raises
    StoreConflict if the scope has other feedback with this name, TooMuchFeedback beyond
    `MAX_PER_TURN`.
    """
    admit_writer(connection)
    turn = connection.execute(
        select(TurnRow.__table__)
        .where(TurnRow.turn_id == new.turn_id, TurnRow.scope == new.scope)
        .with_for_update()
    ).one_or_none()
    if turn is None:
        return None
    known = _known(connection, new)
    if known is not None:
        return known
    if counts(connection, [new.turn_id]).get(new.turn_id, 0) >= MAX_PER_TURN:
        raise TooMuchFeedback(f"a turn keeps at most {MAX_PER_TURN} feedbacks")
    outcome, reason = _outcome(turn, new.now)
    row = {
        "feedback_id": new.feedback_id,
        "turn_id": new.turn_id,
        "scope": new.scope,
        "external_id": new.external_id,
        "body": new.message,
        "reward": new.reward,
        "outcome": outcome,
        "reason": reason,
        "created_at": new.now,
    }
    connection.execute(insert(FeedbackRow), row)
    if outcome in (FeedbackOutcome.TO_BE_JUDGED, FeedbackOutcome.JUDGED_AGAIN):
        judge_again(connection, turn.turn_id, turn.state, new.now)
    return kept(row, is_new=True)


def _known(connection: Connection, new: NewFeedback) -> KeptFeedback | None:
    table = FeedbackRow.__table__
    if new.external_id is not None:
        named = connection.execute(
            select(table).where(
                FeedbackRow.scope == new.scope, FeedbackRow.external_id == new.external_id
            )
        ).one_or_none()
        if named is not None and named.feedback_id != new.feedback_id:
            raise StoreConflict(f"there is other feedback with the id {new.external_id!r}")
    same = select(table).where(FeedbackRow.feedback_id == new.feedback_id)
    row = connection.execute(same).one_or_none()
    return None if row is None else kept(row._mapping, is_new=False)


def _outcome(turn: Row[Any], now: float) -> tuple[FeedbackOutcome, str | None]:
    """What becomes of feedback on a turn, and why it has no effect, if so."""
    if turn.state is TurnState.TRAINED:
        return FeedbackOutcome.TOO_LATE, f"trained in version {turn.trained_version}"
    if turn.state is TurnState.LEASED:
        return FeedbackOutcome.TOO_LATE, "it is being trained on"
    if turn.state is TurnState.DROPPED:
        reason = turn.drop_reason
        if reason in _AFTER_READY:
            return FeedbackOutcome.TOO_LATE, f"dropped: {reason}"
        if reason not in REJUDGEABLE:
            return FeedbackOutcome.NOT_TRAINED, f"dropped: {reason}"
        if reason not in (DropReason.NO_NEXT_STATE, DropReason.OVER_CAPACITY):
            return FeedbackOutcome.JUDGED_AGAIN, None
    is_claimed = turn.claim_until is not None and turn.claim_until >= now
    is_judged = turn.state in (TurnState.REVIEWING, TurnState.SCORING, TurnState.READY)
    if is_judged or (turn.state is TurnState.JUDGING and is_claimed):
        return FeedbackOutcome.JUDGED_AGAIN, None
    return FeedbackOutcome.TO_BE_JUDGED, None


def judge_again(
    connection: Connection, turn_id: str, state: TurnState, now: float, **values: Any
) -> None:
    """-> judging, without what was made of the shorter next state; `values` are set as well.

    A worker that is judging the turn keeps the claim: its verdict is refused (`claims.verdict_op`),
    which frees the turn.
    """
    if state is not TurnState.JUDGING:
        values |= {"claim_owner": None, "claim_until": None}
        for model in (ScoreRow, VoteRow, VerdictRow, ReviewRow):
            connection.execute(delete(model).where(model.turn_id == turn_id))
    connection.execute(
        update(TurnRow)
        .where(TurnRow.turn_id == turn_id)
        .values(
            state=TurnState.JUDGING,
            drop_reason=None,
            drop_detail=None,
            updated_at=now,
            # Whether it can train is decided again.
            priority=late_no_more(),
            **values,
        )
    )
