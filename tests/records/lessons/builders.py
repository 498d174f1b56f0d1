"""Lessons at recorded turns, with sensible values; the way of one to each state."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import numpy as np

from records.lessons.names import LessonKind, LessonState
from records.lessons.types import LessonSample, LessonScore, NewLesson
from records.store import Store
from records.types import VersionSpan
from tests.records.builders import OWNER, SCOPE, recorded

HINT_ID = "hint-0"


def a_lesson(state_turn_id: str, **changes: Any) -> NewLesson:
    """A lesson of a hint, at a recorded turn."""
    values: dict[str, Any] = {
        "lesson_id": uuid4().hex,
        "kind": LessonKind.HINT,
        "scope": SCOPE,
        "hint_id": HINT_ID,
        "state_turn_id": state_turn_id,
        "prompt_id": None,
    }
    return NewLesson(**{**values, **changes})


def a_sample(lesson_id: str, version: int = 0, **changes: Any) -> LessonSample:
    """Three tokens, sampled at the turn's prompt with two ids put in."""
    response_ids = np.asarray(changes.get("response_ids", [7, 8, 9]), dtype=np.int32)
    values: dict[str, Any] = {
        "lesson_id": lesson_id,
        "prompt_ids": np.array([1, 2, 20, 21, 3, 4], dtype=np.int32),
        "rollout_logprobs": np.linspace(-1.0, -0.1, len(response_ids), dtype=np.float32),
        "version_spans": (VersionSpan(version=version, start=0, end=len(response_ids)),),
        "sampling": {"temperature": 1.0},
        "finish_reason": "stop",
    }
    return LessonSample(**{**values, **changes, "response_ids": response_ids})


def a_lesson_score(lesson_id: str, num_tokens: int = 3, **changes: Any) -> LessonScore:
    """Teacher log-probs and the two best tokens at each position, under a hinted prompt."""
    values: dict[str, Any] = {
        "lesson_id": lesson_id,
        "hint": "answer in Celsius",
        "teacher": "start",
        "teacher_version": "0",
        "teacher_prompt_ids": np.array([1, 2, 20, 21, 3, 30, 31, 4], dtype=np.int32),
        "teacher_logprobs": np.full(num_tokens, -0.25, dtype=np.float32),
        "topk_ids": np.arange(2 * num_tokens, dtype=np.int32).reshape(num_tokens, 2),
        "topk_logprobs": np.full((num_tokens, 2), -0.7, dtype=np.float32),
    }
    return LessonScore(**{**values, **changes})


async def claimed_lessons(
    store: Store, state: LessonState, owner: str = OWNER, limit: int = 100
) -> list[str]:
    """Ids of the lessons that a claim gave."""
    lessons = await store.claim_lessons(state, owner=owner, limit=limit, ttl_s=60.0)
    return [one.lesson_id for one in lessons]


async def ready_lessons(
    store: Store,
    kind: LessonKind = LessonKind.HINT,
    count: int = 1,
    *,
    at: str | None = None,
    version: int = 0,
    **changes: Any,
) -> list[str]:
    """`count` new lessons that wait for a trainer. No other may wait to be sampled or scored."""
    turn_id = at or await recorded(store)
    if kind is LessonKind.KEEP:
        changes = {"hint_id": None, **changes}
    lessons = [a_lesson(turn_id, kind=kind, **changes) for _ in range(count)]
    assert await store.add_lessons(lessons) == count
    ids = [one.lesson_id for one in lessons]
    assert sorted(await claimed_lessons(store, LessonState.SAMPLING)) == sorted(ids)
    for lesson_id in ids:
        assert await store.commit_lesson_sample(OWNER, a_sample(lesson_id, version))
    assert sorted(await claimed_lessons(store, LessonState.SCORING)) == sorted(ids)
    for lesson_id in ids:
        assert await store.commit_lesson_score(OWNER, a_lesson_score(lesson_id))
    return ids


async def lesson_state(store: Store, lesson_id: str) -> LessonState:
    """The state of a lesson."""
    lesson = await store.lesson(lesson_id)
    assert lesson is not None
    return lesson.state
