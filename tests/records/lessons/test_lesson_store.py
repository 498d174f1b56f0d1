from __future__ import annotations

import numpy as np
import pytest
from sqlalchemy import func, select

from records.lessons.names import LessonDrop, LessonKind, LessonState
from records.lessons.reading import outcomes_at
from records.lessons.rows import LessonScoreRow, LessonTokensRow
from records.lessons.types import Lesson
from records.names import TurnState
from records.store import Store
from records.types import VersionSpan
from tests.records.builders import OWNER, recorded, state_of
from tests.records.conftest import Clock
from tests.records.lessons.builders import (
    HINT_ID,
    a_lesson,
    a_lesson_score,
    a_sample,
    claimed_lessons,
    lesson_state,
    ready_lessons,
)

SAMPLING, SCORING, READY = LessonState.SAMPLING, LessonState.SCORING, LessonState.READY
DROPPED = LessonState.DROPPED


async def sampling(store: Store, **changes: object) -> str:
    """A new lesson that waits to be sampled."""
    lesson = a_lesson(await recorded(store), **changes)
    assert await store.add_lessons([lesson]) == 1
    return lesson.lesson_id


async def lesson(store: Store, lesson_id: str) -> Lesson:
    """A lesson that exists."""
    found = await store.lesson(lesson_id)
    assert found is not None
    return found


async def test_a_lesson_goes_its_way_and_keeps_every_value(store: Store) -> None:
    turn_id = await recorded(store)
    new = a_lesson(turn_id, kind=LessonKind.COUNTER, prompt_id="words-0")
    await store.add_lessons([new])
    assert await claimed_lessons(store, SAMPLING) == [new.lesson_id]
    sample, score = a_sample(new.lesson_id, 3), a_lesson_score(new.lesson_id)
    assert await store.commit_lesson_sample(OWNER, sample)
    assert await lesson_state(store, new.lesson_id) is SCORING
    assert await claimed_lessons(store, SCORING) == [new.lesson_id]
    assert await store.commit_lesson_score(OWNER, score)
    found = await store.lesson(new.lesson_id)
    assert found is not None
    assert found.sample is not None
    assert found.score is not None
    assert (found.kind, found.state, found.prompt_id) == (LessonKind.COUNTER, READY, "words-0")
    assert (found.scope, found.hint_id) == (new.scope, HINT_ID)
    assert found.state_turn_id == turn_id
    for name in ("prompt_ids", "response_ids", "rollout_logprobs"):
        np.testing.assert_array_equal(getattr(found.sample, name), getattr(sample, name))
    for name in ("teacher_prompt_ids", "teacher_logprobs", "topk_ids", "topk_logprobs"):
        np.testing.assert_array_equal(getattr(found.score, name), getattr(score, name))
    assert found.sample.version_spans == sample.version_spans
    assert (found.score.hint, found.score.teacher) == (score.hint, "start")
    # The turn that it came from is what it was.
    assert await state_of(store, turn_id) is TurnState.AWAITING_NEXT_STATE


async def test_a_lesson_of_a_plain_prompt_stores_no_ids_of_it(store: Store) -> None:
    [lesson_id] = await ready_lessons(store)
    plain = a_lesson((await lesson(store, lesson_id)).state_turn_id)
    await store.add_lessons([plain])
    await claimed_lessons(store, SAMPLING)
    prompt = np.array([1, 2, 3, 4], dtype=np.int32)
    await store.commit_lesson_sample(OWNER, a_sample(plain.lesson_id, prompt_ids=prompt))
    of = select(LessonTokensRow.middle_ids).where(LessonTokensRow.lesson_id == plain.lesson_id)
    middle_ids = await store.read(lambda connection: connection.execute(of).scalar_one())
    assert len(middle_ids) == 0
    sample = (await lesson(store, plain.lesson_id)).sample
    assert sample is not None
    np.testing.assert_array_equal(sample.prompt_ids, prompt)


async def test_claims_are_exclusive_expire_and_are_given_back(store: Store, clock: Clock) -> None:
    lesson_id = await sampling(store)
    assert await claimed_lessons(store, SAMPLING, "one") == [lesson_id]
    assert await claimed_lessons(store, SAMPLING, "two") == []
    assert await store.extend_lesson_claims("two", [lesson_id], 60.0) == 0
    assert await store.extend_lesson_claims("one", [lesson_id], 60.0) == 1
    clock.now += 61
    assert await claimed_lessons(store, SAMPLING, "two") == [lesson_id]
    assert not await store.commit_lesson_sample("one", a_sample(lesson_id))
    assert not await store.drop_lesson("one", lesson_id, LessonDrop.INTERNAL_ERROR)
    assert await store.release_lessons("one", [lesson_id]) == 0
    assert await store.release_lessons("two", [lesson_id]) == 1
    assert await claimed_lessons(store, SAMPLING, "three") == [lesson_id]
    assert await store.commit_lesson_sample("three", a_sample(lesson_id))
    assert not await store.commit_lesson_score("three", a_lesson_score(lesson_id))


async def test_claims_go_round_the_scopes_and_on_behind_the_last(store: Store) -> None:
    turn_id = await recorded(store)
    many = [a_lesson(turn_id, scope="a") for _ in range(6)]
    few = [a_lesson(turn_id, scope=scope) for scope in ("b", "c")]
    await store.add_lessons([*many, *few])
    first = await store.claim_lessons(SAMPLING, owner=OWNER, limit=4, ttl_s=60.0)
    assert [one.scope for one in first] == ["a", "b", "c", "a"]
    [second] = await store.claim_lessons(SAMPLING, owner=OWNER, limit=1, ttl_s=60.0)
    assert second.scope == "a"
    rest = await store.claim_lessons(SAMPLING, owner=OWNER, limit=10, ttl_s=60.0)
    assert len(rest) == 3


async def test_a_dropped_lesson_says_why_and_leaves_nothing_of_what_it_held(store: Store) -> None:
    [kept] = await ready_lessons(store)
    [gone] = await ready_lessons(store, hint_id="hint-1")
    lesson_id = await sampling(store)
    await claimed_lessons(store, SAMPLING)
    assert await store.drop_lesson(OWNER, lesson_id, LessonDrop.SENSITIVE, "an address")
    found = await lesson(store, lesson_id)
    assert (found.state, found.drop_reason) == (DROPPED, LessonDrop.SENSITIVE)
    assert found.drop_detail == "an address"
    assert await store.drop_lessons_of("hint-1", LessonDrop.HINT_ENDED) == 1
    assert await store.drop_lessons_of("hint-1", LessonDrop.HINT_ENDED) == 0
    assert (await lesson(store, gone)).sample is None
    assert await lesson_state(store, kept) is READY
    for model in (LessonTokensRow, LessonScoreRow):
        left = select(func.count()).select_from(model)
        assert await store.read(lambda connection, of=left: connection.scalar(of)) == 1
    assert await store.lesson_drops() == {LessonDrop.SENSITIVE: 1, LessonDrop.HINT_ENDED: 1}


async def test_lessons_of_older_versions_expire_and_those_to_be_sampled_stay(store: Store) -> None:
    [old] = await ready_lessons(store, version=1)
    [new] = await ready_lessons(store, version=2)
    waiting = await sampling(store)
    assert await store.expire_lessons(oldest_allowed=2) == 1
    assert (await lesson(store, old)).drop_reason is LessonDrop.STALE
    assert await lesson_state(store, new) is READY
    assert await lesson_state(store, waiting) is SAMPLING


async def test_counts_are_by_kind_and_state_and_leave_out_what_is_done(store: Store) -> None:
    await ready_lessons(store, LessonKind.HINT, 2)
    await ready_lessons(store, LessonKind.KEEP, 1)
    [gone] = await ready_lessons(store, LessonKind.COUNTER, hint_id="hint-1")
    await store.drop_lessons_of("hint-1", LessonDrop.HINT_ENDED)
    await sampling(store)
    assert await store.lesson_counts() == {
        (LessonKind.HINT, READY): 2,
        (LessonKind.KEEP, READY): 1,
        (LessonKind.HINT, SAMPLING): 1,
    }
    left = await lesson(store, gone)
    found = await store.read(outcomes_at, turn_ids=[left.state_turn_id])
    reason = LessonDrop.HINT_ENDED.value
    assert found[left.state_turn_id] == {f"counter dropped ({reason})": 1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"response_ids": []}, "non-zero"),
        ({"rollout_logprobs": np.zeros(2, dtype=np.float32)}, "2 log-probs"),
        ({"rollout_logprobs": np.full(3, np.nan, dtype=np.float32)}, "not finite"),
        ({"prompt_ids": np.empty(0, dtype=np.int32)}, "without tokens"),
        ({"sampling": {}}, "temperature"),
        ({"version_spans": (VersionSpan(version=0, start=0, end=2),)}, "cover"),
    ],
)
async def test_a_sample_that_could_not_train_is_refused(
    store: Store, changes: dict, message: str
) -> None:
    lesson_id = await sampling(store)
    await claimed_lessons(store, SAMPLING)
    with pytest.raises(ValueError, match=message):
        await store.commit_lesson_sample(OWNER, a_sample(lesson_id, **changes))
    assert await lesson_state(store, lesson_id) is SAMPLING


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_tokens": 2}, "2 teacher log-probs"),
        ({"teacher_logprobs": np.full(3, np.inf, dtype=np.float32)}, "not finite"),
        ({"topk_logprobs": None}, "belong together"),
        ({"topk_logprobs": np.full((3, 2), np.nan, dtype=np.float32)}, "not finite"),
    ],
)
async def test_a_score_that_does_not_fit_is_refused(
    store: Store, changes: dict, message: str
) -> None:
    lesson_id = await sampling(store)
    await claimed_lessons(store, SAMPLING)
    await store.commit_lesson_sample(OWNER, a_sample(lesson_id))
    await claimed_lessons(store, SCORING)
    with pytest.raises(ValueError, match=message):
        await store.commit_lesson_score(OWNER, a_lesson_score(lesson_id, **changes))
    assert await lesson_state(store, lesson_id) is SCORING


async def test_no_lesson_is_added_at_a_turn_that_is_not_there(store: Store) -> None:
    known = a_lesson(await recorded(store))
    assert await store.add_lessons([known, a_lesson("nowhere")]) == 1
    assert await store.add_lessons([]) == 0
    assert await claimed_lessons(store, SAMPLING) == [known.lesson_id]
