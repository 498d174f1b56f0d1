"""Turns with all that was made of them: verdict, score, feedback, samples. Read in batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, select

from records.messages import Message
from records.queue.scores import load_candidate_scores
from records.reading.diagnosis import SessionFacts, session_of_turn
from records.reading.summary import verdicts_of
from records.tables.loading import load_turns
from records.tables.models import FeedbackRow, SampleRow, TurnRow
from records.tables.sql import chunks
from records.training.step_results import StoredSample, stored_sample
from records.types import Score, TurnRecord, Verdict

TURNS_AT_A_TIME = 16
"""How many to read at once: each has all its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenFeedback:
    """Feedback as it was given: the message that the judge reads, the score on [-1, 1]."""

    turn_id: str
    message: Message
    reward: float | None
    created_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeTurn:
    """A turn with all that was made of it. `turn.next_state` ends with its feedback's messages; its
    first `num_followed` messages followed in the conversation. `scores` are those of its hint
    candidates, the selected one's first. Equal nodes mean equal messages with equal histories.
    """

    turn: TurnRecord
    drop_detail: str | None
    trained_version: int | None
    verdict: Verdict | None
    scores: tuple[Score, ...]
    feedback: tuple[GivenFeedback, ...]
    samples: tuple[StoredSample, ...]
    prompt_node_id: str
    response_node_id: str

    @property
    def score(self) -> Score | None:
        """The score under the selected hint."""
        return self.scores[0] if self.scores else None

    @property
    def num_followed(self) -> int:
        """Messages of the next state that followed in the conversation."""
        return len(self.turn.next_state) - len(self.feedback)


def whole_turns(connection: Connection, turn_ids: Sequence[str]) -> list[WholeTurn]:
    """These turns in this order; missing ones are left out."""
    turns = load_turns(connection, turn_ids, skip_unknown=True)
    facts = {
        row.turn_id: row
        for part in chunks(turn_ids)
        for row in connection.execute(
            select(
                TurnRow.turn_id,
                TurnRow.drop_detail,
                TurnRow.trained_version,
                TurnRow.prompt_node_id,
                TurnRow.response_node_id,
            ).where(TurnRow.turn_id.in_(part))
        )
    }
    verdicts = verdicts_of(connection, turn_ids)
    scores = load_candidate_scores(connection, turn_ids)
    feedback = given_feedback(connection, turn_ids)
    samples = samples_of(connection, turn_ids)
    return [
        WholeTurn(
            turn=turn,
            drop_detail=facts[turn.turn_id].drop_detail,
            trained_version=facts[turn.turn_id].trained_version,
            verdict=verdicts.get(turn.turn_id),
            scores=scores.get(turn.turn_id, ()),
            feedback=tuple(feedback.get(turn.turn_id, ())),
            samples=tuple(samples.get(turn.turn_id, ())),
            prompt_node_id=facts[turn.turn_id].prompt_node_id,
            response_node_id=facts[turn.turn_id].response_node_id,
        )
        for turn in turns
    ]


def whole_turn(connection: Connection, turn_id: str) -> tuple[SessionFacts, WholeTurn] | None:
    """A turn, and its session with only this turn; None if there is no such turn."""
    session = session_of_turn(connection, turn_id)
    found = whole_turns(connection, [turn_id])
    return (session, found[0]) if session is not None and found else None


def given_feedback(
    connection: Connection, turn_ids: Sequence[str]
) -> dict[str, list[GivenFeedback]]:
    """The feedback on each turn that has any, oldest first."""
    found: dict[str, list[GivenFeedback]] = {}
    for part in chunks(turn_ids):
        rows = connection.execute(
            select(
                FeedbackRow.turn_id,
                FeedbackRow.body.label("message"),
                FeedbackRow.reward,
                FeedbackRow.created_at,
            )
            .where(FeedbackRow.turn_id.in_(part))
            .order_by(FeedbackRow.created_at, FeedbackRow.feedback_id)
        )
        for row in rows:
            found.setdefault(row.turn_id, []).append(GivenFeedback(**row._mapping))
    return found


def samples_of(connection: Connection, turn_ids: Sequence[str]) -> dict[str, list[StoredSample]]:
    """What training did with each turn that has a sample, by version."""
    found: dict[str, list[StoredSample]] = {}
    for part in chunks(turn_ids):
        rows = connection.execute(
            select(SampleRow.__table__)
            .where(SampleRow.turn_id.in_(part))
            .order_by(SampleRow.version)
        )
        for row in rows:
            found.setdefault(row.turn_id, []).append(stored_sample(row))
    return found
