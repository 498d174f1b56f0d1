"""What people say about a turn after its answer: a text, a corrected answer, a score.

Feedback is part of the turn's next state, with a role of its own: whoever loads the turn finds it
after the messages that followed. It is never a training target by itself. What becomes of new
feedback is decided in `feedback_writes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, bindparam, func, select

from records.messages import Message
from records.names import FeedbackOutcome
from records.tables.models import FeedbackRow
from records.tables.sql import chunks, rows_in

ROLE = "feedback"
_CORRECTION = "The corrected answer: "

_OF_TURNS = (
    select(FeedbackRow.turn_id, FeedbackRow.body, FeedbackRow.reward)
    .where(FeedbackRow.turn_id.in_(bindparam("values", expanding=True)))
    .order_by(FeedbackRow.created_at, FeedbackRow.feedback_id)
)
_COUNTS = (
    select(FeedbackRow.turn_id, func.count().label("number"))
    .where(FeedbackRow.turn_id.in_(bindparam("values", expanding=True)))
    .group_by(FeedbackRow.turn_id)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """What somebody said about a turn. `external_id` is the client's name for it.

    `score` lies in [low, high] of `score_range`; a thumb up or down is a score of 1 or -1 in
    (-1, 1).
    """

    text: str | None = None
    correction: str | None = None
    score: float | None = None
    score_range: tuple[float, float] | None = None
    is_thumb: bool = False
    external_id: str | None = None

    @property
    def reward(self) -> float | None:
        """The score on [-1, 1]; None without one."""
        if self.score is None or self.score_range is None:
            return None
        low, high = self.score_range
        # Divide first: twice the largest float is infinite.
        return 2.0 * ((self.score - low) / (high - low)) - 1.0

    def message(self) -> Message:
        """As the judge reads it."""
        lines = []
        if self.is_thumb:
            lines.append(f"Rating: thumbs {'up' if self.score == 1 else 'down'}")
        elif self.score is not None and self.score_range is not None:
            low, high = self.score_range
            lines.append(f"Rating: {self.score:g} on a scale from {low:g} to {high:g}")
        if self.text is not None:
            lines.append(self.text)
        if self.correction is not None:
            lines.append(f"{_CORRECTION}{self.correction}")
        return {"role": ROLE, "content": "\n".join(lines)}


def corrected_answer(message: Message) -> str | None:
    """The corrected answer in a feedback's message; None if there is none.

    Raises ValueError if two lines begin like one: then it is unclear where it starts.
    """
    _, *found = f"\n{message['content']}".split(f"\n{_CORRECTION}")
    if len(found) > 1:
        raise ValueError("the feedback names two corrected answers")
    return found[0] if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFeedback:
    """Feedback as it is stored, and what became of it; `reason` says why it has no effect, if it
    has none.

    `is_new` is False if it was already there.
    """

    feedback_id: str
    turn_id: str
    outcome: FeedbackOutcome
    reason: str | None
    created_at: float
    is_new: bool


def kept(row: Any, *, is_new: bool) -> KeptFeedback:
    """A row of the table, or its mapping, as a value."""
    names = ("feedback_id", "turn_id", "outcome", "reason", "created_at")
    return KeptFeedback(**{name: row[name] for name in names}, is_new=is_new)


def counts(connection: Connection, turn_ids: Iterable[str]) -> dict[str, int]:
    """Number of feedbacks on each turn that has any."""
    return {row.turn_id: row.number for row in rows_in(connection, _COUNTS, turn_ids)}


def load(
    connection: Connection, turn_ids: Sequence[str]
) -> dict[str, tuple[list[Message], float | None]]:
    """The feedback on each turn that has some, oldest first, and the reward of its newest score."""
    found: dict[str, tuple[list[Message], float | None]] = {}
    for part in chunks(turn_ids):
        for row in connection.execute(_OF_TURNS, {"values": list(part)}):
            messages, reward = found.get(row.turn_id, ([], None))
            newest = reward if row.reward is None else row.reward
            found[row.turn_id] = ([*messages, row.body], newest)
    return found


def kept_on(connection: Connection, turn_ids: Sequence[str]) -> list[KeptFeedback]:
    """All feedback on these turns, oldest first."""
    found: list[KeptFeedback] = []
    for part in chunks(turn_ids):
        rows = connection.execute(
            select(FeedbackRow.__table__).where(FeedbackRow.turn_id.in_(part))
        )
        found += [kept(row._mapping, is_new=False) for row in rows]
    return sorted(found, key=lambda one: (one.created_at, one.feedback_id))
