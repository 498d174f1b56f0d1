"""What was written from words that are forgotten goes with them."""

from __future__ import annotations

from dataclasses import replace

from sqlalchemy import Connection, select

from records.care.deletion import delete_sessions_op
from records.hints.types import Examination, HintPrompt, PromptKind
from records.lessons.names import LessonDrop, LessonKind, LessonState
from records.lessons.rows import LessonScoreRow, LessonTokensRow
from records.store import Store
from records.training.share import LessonShares
from tests.opd.rehearsal.builders import a_prompt
from tests.records.builders import TRAINER, a_result, a_version
from tests.records.hints.test_memory import EXAMINER, objected, one
from tests.records.lessons.builders import ready_lessons

CELSIUS, ALSO_CELSIUS = "use Celsius", "in Celsius please"
ALL_HINTED = LessonShares(counter=0, keep=0, hold_s=0)


def a_text(hint_id: str) -> HintPrompt:
    return replace(a_prompt(), hint_id=hint_id, kind=PromptKind.OPPOSITE)


async def of_two_sessions(store: Store) -> tuple[str, str, str]:
    """(a rule with a text, the turn that its own text came from, another turn)."""
    first, second = await objected(store, CELSIUS), await objected(store, CELSIUS)
    [claim] = await store.claim_hints(owner=EXAMINER, limit=1, ttl_s=60)
    found = Examination(hint_id=claim.hint_id, is_rule=True, prompts=(a_text(claim.hint_id),))
    assert await store.commit_examination(EXAMINER, found)
    return claim.hint_id, first, second


async def forget(store: Store, turn_id: str) -> tuple[int, ...]:
    turn = await store.turn(turn_id)
    assert turn is not None
    deleted = await store.write(
        delete_sessions_op, session_ids=[turn.session_id], reason="forget", now=1.0
    )
    assert deleted.num_sessions == 1
    return deleted.versions


def remains(connection: Connection) -> set[str]:
    """Lessons of which there is something to read."""
    return {
        lesson_id
        for model in (LessonScoreRow, LessonTokensRow)
        for lesson_id in connection.scalars(select(model.lesson_id))
    }


async def trained(store: Store, hint_id: str, version: int) -> str:
    [lesson_id] = await ready_lessons(store, hint_id=hint_id)
    assert await store.lease(owner=TRAINER, count=1, ttl_s=60, lessons=ALL_HINTED)
    await store.commit_step(version=a_version(version), results=[], lessons=[a_result(lesson_id)])
    return lesson_id


async def test_lessons_with_a_forgotten_text_are_dropped_and_erased(store: Store) -> None:
    hint_id, origin, _ = await of_two_sessions(store)
    await trained(store, hint_id, 1)
    [ready] = await ready_lessons(store, hint_id=hint_id)
    assert await forget(store, origin) == (1,)
    lesson = await store.lesson(ready)
    assert lesson is not None
    assert (lesson.state, lesson.drop_reason) == (LessonState.DROPPED, LessonDrop.FORGOTTEN)
    assert await store.read(remains) == set()
    hint = await one(store, hint_id)
    assert (hint.text, hint.num_confirmed, hint.is_rule) == (CELSIUS, 1, None)


async def test_texts_written_from_another_users_forgotten_words_go(store: Store) -> None:
    hint_id, _, other = await of_two_sessions(store)
    await ready_lessons(store, LessonKind.COUNTER, hint_id=hint_id, prompt_id="p0")
    await forget(store, other)
    assert await store.hint_prompts(hint_id) == []
    assert await store.read(remains) == set()
    hint = await one(store, hint_id)
    assert (hint.text, hint.is_rule) == (CELSIUS, None)
    [claim] = await store.claim_hints(owner=EXAMINER, limit=1, ttl_s=60)
    assert claim.hint_id == hint_id


async def test_a_lesson_of_a_hint_that_is_deleted_during_the_step_is_erased(store: Store) -> None:
    hint_id, _, _ = await of_two_sessions(store)
    [lesson_id] = await ready_lessons(store, hint_id=hint_id)
    assert await store.lease(owner=TRAINER, count=1, ttl_s=60, lessons=ALL_HINTED)
    assert await store.delete_hint(hint_id) is not None
    await store.drop_lessons_of(hint_id, LessonDrop.HINT_ENDED)  # so says the worker, too
    assert await store.read(remains) == {lesson_id}, "a step is being taken on it"
    await store.commit_step(version=a_version(1), results=[], lessons=[a_result(lesson_id)])
    lesson = await store.lesson(lesson_id)
    assert lesson is not None
    assert (lesson.state, lesson.trained_version) == (LessonState.TRAINED, 1)
    assert await store.read(remains) == set()


async def test_the_texts_of_hints_that_were_merged_into_a_deleted_one_go(store: Store) -> None:
    into, _, _ = await of_two_sessions(store)
    await objected(store, ALSO_CELSIUS)
    [new] = await store.claim_hints(owner=EXAMINER, limit=1, ttl_s=60)
    merge = Examination(hint_id=new.hint_id, merged_into=into)
    assert await store.commit_examination(EXAMINER, merge)
    assert (await one(store, new.hint_id)).text == ALSO_CELSIUS
    assert await store.delete_hint(into) is not None
    assert [hint.text for hint in await store.hints()] == ["", ""]
