"""The tables of the hint memory."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Double, ForeignKey, Index, Text
from sqlalchemy.orm import Mapped, mapped_column

from records.hints.types import HintStatus, PromptKind, RehearsalBlock
from records.tables.columns import CleanText, enum_column
from records.tables.models import Base


class HintRow(Base):
    """A hint of a scope; see `Hint`. `text_key` identifies its text while it holds, and is NULL
    afterwards: for each text, a scope has one hint that holds. `origin_turn_id` is the turn whose
    verdict has this exact text.
    """

    __tablename__ = "hints"
    hint_id: Mapped[str] = mapped_column(CleanText, primary_key=True)
    scope: Mapped[str] = mapped_column(CleanText)
    text: Mapped[str] = mapped_column(CleanText)
    text_key: Mapped[str | None] = mapped_column(Text)
    origin_turn_id: Mapped[str | None] = mapped_column(Text)
    status: Mapped[HintStatus] = mapped_column(enum_column(HintStatus))
    detail: Mapped[str | None] = mapped_column(CleanText)
    created_at: Mapped[float] = mapped_column(Double)
    updated_at: Mapped[float] = mapped_column(Double)
    claim_owner: Mapped[str | None] = mapped_column(Text)
    claim_until: Mapped[float | None] = mapped_column(Double)
    is_rule: Mapped[bool | None] = mapped_column(Boolean)
    block: Mapped[RehearsalBlock | None] = mapped_column(enum_column(RehearsalBlock))
    opposed_by: Mapped[str | None] = mapped_column(Text)
    merged_into: Mapped[str | None] = mapped_column(Text)
    first_gap: Mapped[float | None] = mapped_column(Double)
    gap: Mapped[float | None] = mapped_column(Double)
    gap_high: Mapped[float | None] = mapped_column(Double)
    trained_since: Mapped[int | None] = mapped_column(BigInteger)
    num_steps: Mapped[int]
    sessions_asked: Mapped[int] = mapped_column(server_default="0")
    __table_args__ = (
        Index(None, "scope", "text_key", unique=True),
        Index(None, "status", "is_rule", "scope", "created_at"),
        Index(None, "created_at"),
        Index(None, "origin_turn_id"),
    )


class HintSourceRow(Base):
    """A turn that a hint came from; see `HintSource`."""

    __tablename__ = "hint_sources"
    hint_id: Mapped[str] = mapped_column(CleanText, ForeignKey("hints.hint_id"), primary_key=True)
    turn_id: Mapped[str] = mapped_column(Text, ForeignKey("turns.turn_id"), primary_key=True)
    session_id: Mapped[str] = mapped_column(Text)
    text: Mapped[str] = mapped_column(CleanText)
    words: Mapped[str] = mapped_column(CleanText)
    num_votes: Mapped[int]
    num_positive: Mapped[int]
    created_at: Mapped[float] = mapped_column(Double)
    __table_args__ = (Index(None, "turn_id"),)


class HintPromptRow(Base):
    """Words that are added to a recorded state for a hint; see `HintPrompt`."""

    __tablename__ = "hint_prompts"
    prompt_id: Mapped[str] = mapped_column(Text, primary_key=True)
    hint_id: Mapped[str] = mapped_column(CleanText, ForeignKey("hints.hint_id"))
    kind: Mapped[PromptKind] = mapped_column(enum_column(PromptKind))
    text: Mapped[str] = mapped_column(CleanText)
    held_out: Mapped[bool]
    asked: Mapped[int]
    followed: Mapped[int]
    dropped: Mapped[str | None] = mapped_column(CleanText)
    __table_args__ = (Index(None, "hint_id"),)


class HintStateRow(Base):
    """A recorded state of a hint; see `HintState`."""

    __tablename__ = "hint_states"
    hint_id: Mapped[str] = mapped_column(CleanText, ForeignKey("hints.hint_id"), primary_key=True)
    turn_id: Mapped[str] = mapped_column(Text, ForeignKey("turns.turn_id"), primary_key=True)
    held_out: Mapped[bool]
    __table_args__ = (Index(None, "turn_id"),)
