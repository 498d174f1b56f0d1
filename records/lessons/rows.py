"""The tables of lessons: what is sampled where, its tokens, its score, and what training did."""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Double, ForeignKey, Index, LargeBinary, Text
from sqlalchemy.orm import Mapped, mapped_column

from records.lessons.names import LessonDrop, LessonKind, LessonState
from records.tables.columns import CleanText, IdsBlob, JsonText, LogprobsBlob, enum_column
from records.tables.models import Base


class LessonRow(Base):
    """One lesson and where it stands. `claim_owner` holds it until `claim_until`.

    There is no reference to the table of hints, because a hint may be forgotten before its lessons.
    """

    __tablename__ = "lessons"
    lesson_id: Mapped[str] = mapped_column(Text, primary_key=True)
    kind: Mapped[LessonKind] = mapped_column(enum_column(LessonKind))
    scope: Mapped[str] = mapped_column(CleanText)
    hint_id: Mapped[str | None] = mapped_column(CleanText)
    state_turn_id: Mapped[str] = mapped_column(Text, ForeignKey("turns.turn_id"))
    prompt_id: Mapped[str | None] = mapped_column(Text)
    state: Mapped[LessonState] = mapped_column(enum_column(LessonState))
    drop_reason: Mapped[LessonDrop | None] = mapped_column(enum_column(LessonDrop))
    drop_detail: Mapped[str | None] = mapped_column(CleanText)
    claim_owner: Mapped[str | None] = mapped_column(Text)
    claim_until: Mapped[float | None] = mapped_column(Double)
    oldest_version: Mapped[int | None] = mapped_column(BigInteger)
    newest_version: Mapped[int | None] = mapped_column(BigInteger)
    created_at: Mapped[float] = mapped_column(Double)
    updated_at: Mapped[float] = mapped_column(Double)
    trained_version: Mapped[int | None] = mapped_column(
        BigInteger, ForeignKey("policy_versions.version")
    )
    __table_args__ = (
        Index(None, "state", "kind", "scope", "created_at"),
        Index(None, "kind", "updated_at"),
        Index(None, "hint_id", "created_at"),
        Index(None, "state_turn_id"),
        Index(None, "trained_version"),
        Index(None, "newest_version"),
    )


class LessonTokensRow(Base):
    """What the policy answered in a lesson.

    Its prompt is that of its recorded turn with `middle_ids` between its first `prefix_length` and
    its last `suffix_length` ids. `checksum` identifies prompt + response.
    """

    __tablename__ = "lesson_tokens"
    lesson_id: Mapped[str] = mapped_column(Text, ForeignKey("lessons.lesson_id"), primary_key=True)
    prefix_length: Mapped[int]
    suffix_length: Mapped[int]
    middle_ids: Mapped[Any] = mapped_column(IdsBlob)
    response_ids: Mapped[Any] = mapped_column(IdsBlob)
    rollout_logprobs: Mapped[Any] = mapped_column(LogprobsBlob)
    checksum: Mapped[bytes] = mapped_column(LargeBinary)
    version_spans: Mapped[Any] = mapped_column(JsonText)
    sampling: Mapped[Any] = mapped_column(JsonText)
    finish_reason: Mapped[str] = mapped_column(CleanText)


class LessonScoreRow(Base):
    """The teacher's log-probs of a lesson. Its prompt is the lesson's with `middle_ids` between the
    first `prefix_length` and the last `suffix_length` ids; top-k scores are stored position after
    position.
    """

    __tablename__ = "lesson_scores"
    lesson_id: Mapped[str] = mapped_column(Text, ForeignKey("lessons.lesson_id"), primary_key=True)
    hint: Mapped[str] = mapped_column(CleanText)
    teacher: Mapped[str] = mapped_column(Text)
    teacher_version: Mapped[str] = mapped_column(Text)
    prefix_length: Mapped[int]
    suffix_length: Mapped[int]
    middle_ids: Mapped[Any] = mapped_column(IdsBlob)
    teacher_logprobs: Mapped[Any] = mapped_column(LogprobsBlob)
    topk_ids: Mapped[Any] = mapped_column(IdsBlob, nullable=True)
    topk_logprobs: Mapped[Any] = mapped_column(LogprobsBlob, nullable=True)
    created_at: Mapped[float] = mapped_column(Double)


class LessonSampleRow(Base):
    """What training did with a lesson in the step that made `version`."""

    __tablename__ = "lesson_samples"
    lesson_id: Mapped[str] = mapped_column(Text, ForeignKey("lessons.lesson_id"), primary_key=True)
    version: Mapped[int] = mapped_column(
        BigInteger, ForeignKey("policy_versions.version"), primary_key=True
    )
    staleness: Mapped[int]
    advantage_mean: Mapped[float] = mapped_column(Double)
    advantage_abs_max: Mapped[float] = mapped_column(Double)
    advantages: Mapped[Any] = mapped_column(LogprobsBlob)
    created_at: Mapped[float] = mapped_column(Double)


OF_A_LESSON = (LessonSampleRow, LessonScoreRow, LessonTokensRow)
"""What is made of a lesson; it is deleted before the lesson."""
