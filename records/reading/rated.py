"""Turns that somebody gave feedback on, together with others that answered the same prompt.

Their texts and tokens are not read here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from sqlalchemy import Connection, exists, select

from records.names import DropReason, TurnType
from records.reading.exporting import Wanted, conditions
from records.reading.whole_turns import given_feedback
from records.tables.models import FeedbackRow, RecordingRow, SessionRow, TurnRow
from records.tables.sql import chunks

_TURNS_AT_A_TIME = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RatedTurn:
    """A turn with feedback. `prompt` and `answer` are the same for equal prompts with equal tools,
    and for equal answers; `reward` is the newest score on [-1, 1], None without one.
    """

    turn_id: str
    prompt: tuple[str, str | None]
    answer: str
    turn_type: TurnType
    drop_reason: DropReason | None
    finish_reason: str | None
    is_held_out: bool
    reward: float | None


def rated_turns(connection: Connection, wanted: Wanted) -> list[RatedTurn]:
    """All turns with feedback in these sessions, those of one prompt together, oldest first."""
    rows = connection.execute(
        select(
            TurnRow.turn_id,
            TurnRow.prompt_node_id,
            TurnRow.toolset_hash,
            TurnRow.response_node_id,
            TurnRow.turn_type,
            TurnRow.drop_reason,
            TurnRow.finish_reason,
            RecordingRow.held_out,
        )
        .outerjoin(RecordingRow, RecordingRow.turn_id == TurnRow.turn_id)
        .join(SessionRow, SessionRow.session_id == TurnRow.session_id)
        .where(*conditions(wanted), exists().where(FeedbackRow.turn_id == TurnRow.turn_id))
        .order_by(TurnRow.prompt_node_id, TurnRow.toolset_hash, TurnRow.created_at, TurnRow.turn_id)
    ).all()
    rewards: dict[str, float | None] = {}
    for part in chunks(rows, _TURNS_AT_A_TIME):
        said = given_feedback(connection, [row.turn_id for row in part])
        for turn_id, given in said.items():
            scores = [one.reward for one in given if one.reward is not None]
            rewards[turn_id] = scores[-1] if scores else None
    return [
        RatedTurn(
            turn_id=row.turn_id,
            prompt=(row.prompt_node_id, row.toolset_hash),
            answer=row.response_node_id,
            turn_type=row.turn_type,
            drop_reason=row.drop_reason,
            finish_reason=row.finish_reason,
            is_held_out=bool(row.held_out),
            reward=rewards.get(row.turn_id),
        )
        for row in rows
    ]


def by_prompt(turns: list[RatedTurn]) -> Iterator[list[RatedTurn]]:
    """The turns of each prompt."""
    for _, group in groupby(turns, key=lambda turn: turn.prompt):
        yield list(group)
