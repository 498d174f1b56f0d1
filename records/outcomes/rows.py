"""The table of outcomes."""

from __future__ import annotations

from enum import StrEnum

from sqlalchemy import ColumnElement, Double, ForeignKey, Text, exists
from sqlalchemy.orm import Mapped, mapped_column

from records.tables.columns import CleanText, enum_column
from records.tables.models import Base, TurnRow


class OutcomeSource(StrEnum):
    """Who gives a session's outcome. The set is closed."""

    FEEDBACK = "feedback"
    RECORDING = "recording"
    VERIFIER = "verifier"


class OutcomeRow(Base):
    """A session's outcome: `value` in [0, 1], NULL while a verifier is asked. It covers the turns
    that were answered until `covers_until`, the time of the newest turn known then.

    `claim_owner` asks the verifier until `claim_until`; `failure` says why it was asked in vain.
    """

    __tablename__ = "outcomes"
    session_id: Mapped[str] = mapped_column(
        Text, ForeignKey("sessions.session_id"), primary_key=True
    )
    value: Mapped[float | None] = mapped_column(Double)
    source: Mapped[OutcomeSource] = mapped_column(enum_column(OutcomeSource))
    reason: Mapped[str | None] = mapped_column(CleanText)
    failure: Mapped[str | None] = mapped_column(CleanText)
    covers_until: Mapped[float | None] = mapped_column(Double)
    claim_owner: Mapped[str | None] = mapped_column(Text)
    claim_until: Mapped[float | None] = mapped_column(Double)
    created_at: Mapped[float] = mapped_column(Double)


class TurnValueRow(Base):
    """What a turn was worth before it was answered: the mean outcome of `tries` further answers to
    its prompt; NULL without any.
    """

    __tablename__ = "turn_values"
    turn_id: Mapped[str] = mapped_column(Text, ForeignKey("turns.turn_id"), primary_key=True)
    value: Mapped[float | None] = mapped_column(Double)
    tries: Mapped[int]


def has_outcome(row: type[TurnRow]) -> ColumnElement[bool]:
    """Of a row of `turns`: whether its session's outcome is known and covers it. It does not cover
    a turn that came later.
    """
    return exists().where(
        OutcomeRow.session_id == row.session_id,
        OutcomeRow.value.is_not(None),
        OutcomeRow.covers_until >= row.created_at,
    )


def came_later(row: type[TurnRow]) -> ColumnElement[bool]:
    """Of a row of `turns`: whether it came after its session's outcome, so that it gets none."""
    return exists().where(
        OutcomeRow.session_id == row.session_id,
        OutcomeRow.value.is_not(None),
        OutcomeRow.covers_until < row.created_at,
    )


def was_given_up(row: type[TurnRow]) -> ColumnElement[bool]:
    """Of a row of `turns`: whether the verifier gave up on its session, and is not asked again."""
    return exists().where(OutcomeRow.session_id == row.session_id, OutcomeRow.failure.is_not(None))
