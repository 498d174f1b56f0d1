"""The value types of lessons: what is sampled where, under which teacher, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from records.lessons.names import LessonDrop, LessonKind, LessonState
from records.training.teaching import Ids, Logprobs
from records.types import VersionSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class NewLesson:
    """A lesson to be sampled: at the recorded state of `state_turn_id`, with the words of
    `prompt_id` added, if any. `scope` is that of the hint (of a keep-lesson: of the state).
    Measurements are not lessons: they are sampled and scored without being stored.
    """

    lesson_id: str
    kind: LessonKind
    scope: str
    hint_id: str | None
    state_turn_id: str
    prompt_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LessonSample:
    """What the policy answered. prompt_ids [P], response_ids [R], rollout_logprobs [R] at the
    sampling `temperature`, in nats.
    """

    lesson_id: str
    prompt_ids: Ids
    response_ids: Ids
    rollout_logprobs: Logprobs
    version_spans: tuple[VersionSpan, ...]
    sampling: dict[str, Any]
    finish_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LessonScore:
    """The teacher's log-probs [R] at temperature 1, in nats, of a lesson's response under
    `teacher_prompt_ids` [P']; `hint` is "" if it reads none. Top-k [R, K] if asked for.
    """

    lesson_id: str
    hint: str
    teacher: str
    teacher_version: str
    teacher_prompt_ids: Ids
    teacher_logprobs: Logprobs
    topk_ids: Ids | None = None
    topk_logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """A stored lesson; `sample` is set once it was drawn, `score` once a teacher read it."""

    lesson_id: str
    kind: LessonKind
    scope: str
    hint_id: str | None
    state_turn_id: str
    prompt_id: str | None
    state: LessonState
    drop_reason: LessonDrop | None
    drop_detail: str | None
    created_at: float
    trained_version: int | None
    sample: LessonSample | None = None
    score: LessonScore | None = None

    @property
    def holds(self) -> bool:
        """Whether it keeps what its hint taught."""
        return self.kind is LessonKind.KEEP and self.hint_id is not None
