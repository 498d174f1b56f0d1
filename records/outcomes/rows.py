"""The table of outcomes."""

from __future__ import annotations

from enum import StrEnum

from sqlalchemy import ColumnElement, Double, ForeignKey, Text, exists
from sqlalchemy.orm import Mapped, mapped_column

from records.tables.columns import CleanText, enum_column
from records.tables.models import Base, TurnRow


class OutcomeSource(StrEnum):
    """Who says what a session came to. The set is closed."""

    FEEDBACK = "feedback"
    RECORDING = "recording"
    VERIFIER = "verifier"


class OutcomeRow(Base):
    """What a session came to: `value` in [0, 1], NULL while a verifier is asked. It is of the turns
    that were answered until `covers_until`, the newest that was known then.

    `claim_owner` asks it until `claim_until`; `failure` says why it was asked in vain.
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


def has_outcome(row: type[TurnRow]) -> ColumnElement[bool]:
    """Of a row of `turns`: whether it is known what its session came to. A turn that came later is
    no part of that.
    """
    return exists().where(
        OutcomeRow.session_id == row.session_id,
        OutcomeRow.value.is_not(None),
        OutcomeRow.covers_until >= row.created_at,
    )


def came_later(row: type[TurnRow]) -> ColumnElement[bool]:
    """Of a row of `turns`: whether its session's outcome was said before it, so that none comes."""
    return exists().where(
        OutcomeRow.session_id == row.session_id,
        OutcomeRow.value.is_not(None),
        OutcomeRow.covers_until < row.created_at,
    )


def was_given_up(row: type[TurnRow]) -> ColumnElement[bool]:
    """Of a row of `turns`: whether the verifier gave up its session, and is not asked again."""
    return exists().where(OutcomeRow.session_id == row.session_id, OutcomeRow.failure.is_not(None))
