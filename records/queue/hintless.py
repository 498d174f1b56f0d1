"""Turns that lose their hint and have more to teach: they go on with their reward alone.

A turn with a hint may also have a reward, or wait for one from its session's outcome. That the hint
cannot be used, or no longer holds, is no reason to lose the reward.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, Select, and_, delete, exists, or_, select, update

from records.names import DropReason, TurnState
from records.queue.round_robin import late_no_more
from records.tables.models import RecordingRow, ScoreRow, TurnRow, VerdictRow
from records.tables.sql import chunks
from records.turns.recording import RecordingKind

OF_THE_HINT = frozenset(
    {
        DropReason.HINT_AGREES,
        DropReason.NO_USER_MESSAGE,
        DropReason.HINTED_PROMPT_MISMATCH,
        DropReason.HINTED_PROMPT_TOO_LONG,
        DropReason.TEACHER_MISALIGNED,
        DropReason.TEACHER_LOGPROBS_INVALID,
        DropReason.TEACHER_UNAVAILABLE,
        DropReason.UNKNOWN_TEACHER,
        DropReason.HINT_ENDED,
        DropReason.HINT_UNGUARDED,
        DropReason.REVIEW_REJECTED,
    }
)
"""Reasons that concern only the hint, not the turn itself."""


def go_on_without_hint(connection: Connection, turn_ids: Sequence[str], now: float) -> set[str]:
    """Those of these turns (whose rows the caller has locked) with a reward or an outcome to come
    -> ready, without their hints and what a teacher read of them. Returns their ids.

    Recordings stay as they are: the policy may not have scored them yet.
    """
    found: set[str] = set()
    for part in chunks(turn_ids):
        found.update(connection.scalars(_rewarded(part)))
    for part in chunks(sorted(found)):
        connection.execute(delete(ScoreRow).where(ScoreRow.turn_id.in_(part)))
        connection.execute(
            update(VerdictRow)
            .where(VerdictRow.turn_id.in_(part))
            .values(hint=None, candidates=None)
        )
        connection.execute(
            update(TurnRow)
            .where(TurnRow.turn_id.in_(part))
            .values(
                state=TurnState.READY,
                drop_reason=None,
                drop_detail=None,
                trained_version=None,
                times_trained=0,
                times_left=0,
                priority=late_no_more(),
                claim_owner=None,
                claim_until=None,
                updated_at=now,
            )
        )
    return found


def _rewarded(turn_ids: Sequence[str]) -> Select[str]:
    recorded = exists().where(
        RecordingRow.turn_id == VerdictRow.turn_id, RecordingRow.kind != RecordingKind.RESAMPLED
    )
    return select(VerdictRow.turn_id).where(
        and_(
            VerdictRow.turn_id.in_(turn_ids),
            or_(VerdictRow.reward.is_not(None), VerdictRow.awaits_outcome),
            ~recorded,
        )
    )
