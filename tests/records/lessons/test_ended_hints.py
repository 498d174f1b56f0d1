"""Lessons of a hint that holds no more: dropped in the transaction that ends it."""

from __future__ import annotations

import pytest
from sqlalchemy import func, select

from records.hints.types import Examination, HintStatus, RehearsalBlock
from records.lessons.names import LessonDrop, LessonState
from records.lessons.rows import LessonScoreRow
from records.store import Store
from tests.records.hints.test_memory import EXAMINER, examined, objected
from tests.records.lessons.builders import ready_lessons

CELSIUS, ALSO_CELSIUS, FAHRENHEIT = "use Celsius", "in Celsius please", "use Fahrenheit"


async def of_hint(store: Store, text: str = CELSIUS) -> tuple[str, str]:
    """(hint, ready lesson) ids."""
    hint = await examined(store, text)
    [lesson_id] = await ready_lessons(store, hint_id=hint.hint_id)
    return hint.hint_id, lesson_id


async def fate(store: Store, lesson_id: str) -> tuple[LessonState, LessonDrop | None]:
    lesson = await store.lesson(lesson_id)
    assert lesson is not None
    return lesson.state, lesson.drop_reason


ENDED = (LessonState.DROPPED, LessonDrop.HINT_ENDED)


@pytest.mark.parametrize("status", [HintStatus.RESTING, HintStatus.STUCK, HintStatus.WITHDRAWN])
async def test_a_hint_that_is_practised_no_more(store: Store, status: HintStatus) -> None:
    hint_id, lesson_id = await of_hint(store)
    _, other = await of_hint(store, FAHRENHEIT)
    assert await store.set_hint_status(hint_id, status, "")
    assert await fate(store, lesson_id) == ENDED
    assert await fate(store, other) == (LessonState.READY, None)


async def test_a_hint_that_waits(store: Store) -> None:
    hint_id, lesson_id = await of_hint(store)
    await store.set_hint_block(hint_id, None, None)
    assert await fate(store, lesson_id) == (LessonState.READY, None)
    await store.set_hint_block(hint_id, RehearsalBlock.NO_COUNTER_LESSONS, "none is followed")
    assert await fate(store, lesson_id) == ENDED


async def test_a_hint_that_is_contradicted(store: Store) -> None:
    hint_id, lesson_id = await of_hint(store)
    await examined(store, FAHRENHEIT, contradicts=(hint_id,))
    assert await fate(store, lesson_id) == ENDED


async def test_a_hint_that_is_one_with_another(store: Store) -> None:
    first, _ = await of_hint(store)
    hint_id, lesson_id = await of_hint(store, ALSO_CELSIUS)
    await objected(store, ALSO_CELSIUS)
    await store.set_hint_block(hint_id, RehearsalBlock.NO_MAJORITY, None)
    await objected(store, ALSO_CELSIUS)
    [claim] = await store.claim_hints(owner=EXAMINER, limit=1, ttl_s=60)
    assert claim.hint_id == hint_id
    merged = Examination(hint_id=hint_id, merged_into=first)
    assert await store.commit_examination(EXAMINER, merged)
    assert await fate(store, lesson_id) == ENDED


async def test_nothing_of_a_deleted_hint_is_left_in_its_lessons(store: Store) -> None:
    hint_id, lesson_id = await of_hint(store)
    assert await store.delete_hint(hint_id) is not None
    assert await fate(store, lesson_id) == (LessonState.DROPPED, LessonDrop.FORGOTTEN)

    def scores(connection: object) -> int:
        return connection.scalar(select(func.count()).select_from(LessonScoreRow))  # type: ignore[attr-defined]

    assert await store.read(scores) == 0
