"""Lessons under deletion, retention, and the check of a whole database."""

from __future__ import annotations

import pytest
from sqlalchemy import func, select, text

from records.care.housekeeping import Housekeeping
from records.care.verify import verify_database
from records.lessons.names import LessonDrop, LessonKind, LessonState
from records.lessons.rows import OF_A_LESSON, LessonRow
from records.store import Store
from records.training.share import LessonShares
from tests.records.builders import TRAINER, a_result, a_session, a_version, recorded
from tests.records.conftest import Clock
from tests.records.lessons.builders import a_lesson, lesson_state, ready_lessons

ALL_HINTED = LessonShares(counter=0.0, keep=0.0, hold_s=0.0)
DAY_S = 86_400.0


async def rows_left(store: Store) -> list[int]:
    """Rows of lessons, and of what was made of them."""
    counts = [select(func.count()).select_from(model) for model in (LessonRow, *OF_A_LESSON)]
    return [
        await store.read(lambda connection, of=count: connection.scalar(of) or 0)
        for count in counts
    ]


async def trained_at(store: Store, session_id: str, version: int) -> str:
    """A lesson at a turn of this session that the step of `version` trained."""
    at = await recorded(store, session_id=session_id)
    [lesson_id] = await ready_lessons(store, at=at)
    assert len(await store.lease(owner=TRAINER, count=1, ttl_s=60.0, lessons=ALL_HINTED)) == 1
    results = [a_result(lesson_id)]
    await store.commit_step(version=a_version(version), results=[], lessons=results)
    return lesson_id


async def test_forgetting_a_session_takes_its_lessons_and_names_the_versions(
    store: Store, clock: Clock
) -> None:
    gone, stays = await a_session(store), await a_session(store)
    await trained_at(store, gone, 1)
    kept = await trained_at(store, stays, 2)
    await ready_lessons(store, at=await recorded(store, session_id=gone))
    keeper = Housekeeping(store, clock)
    deleted = await keeper.delete([gone], "forget", patience_s=0.0)
    assert (deleted.num_sessions, deleted.num_turns, deleted.num_lessons) == (1, 2, 2)
    assert deleted.versions == (1,)
    assert await rows_left(store) == [1, 1, 1, 1]
    assert await lesson_state(store, kept) is LessonState.TRAINED
    assert await keeper.trained_lessons() == {kept: 2}
    assert await verify_database(store.config) == []


async def test_a_session_whose_lesson_is_being_trained_on_waits_for_the_step(
    store: Store, clock: Clock
) -> None:
    session = await a_session(store)
    at = await recorded(store, session_id=session)
    [leased] = await ready_lessons(store, at=at)
    assert len(await store.lease(owner=TRAINER, count=1, ttl_s=60.0, lessons=ALL_HINTED)) == 1
    [ready] = await ready_lessons(store, at=at)
    keeper = Housekeeping(store, clock)
    clock.now += 2 * DAY_S
    assert (await keeper.expire(1.0)).num_sessions == 0
    deleted = await keeper.delete([session], "forget", patience_s=0.0)
    assert (deleted.num_turns, deleted.leased_by) == (0, (TRAINER,))
    assert await lesson_state(store, ready) is LessonState.DROPPED
    assert await store.release_leases(TRAINER) == 1
    found = await store.lesson(leased)
    assert found is not None
    assert (found.state, found.drop_reason) == (LessonState.DROPPED, LessonDrop.FORGOTTEN)
    assert await store.add_lessons([a_lesson(at)]) == 0, "its turn is to be forgotten"
    deleted = await keeper.delete([session], "forget", patience_s=0.0)
    assert (deleted.num_turns, deleted.num_lessons, deleted.versions) == (1, 2, ())
    assert await rows_left(store) == [0, 0, 0, 0]


async def test_retention_takes_lessons_with_their_turns(store: Store, clock: Clock) -> None:
    await trained_at(store, await a_session(store), 1)
    clock.now += 2 * DAY_S
    deleted = await Housekeeping(store, clock).expire(1.0)
    assert (deleted.num_sessions, deleted.num_lessons, deleted.versions) == (1, 1, (1,))
    assert await rows_left(store) == [0, 0, 0, 0]


async def in_every_state(store: Store) -> None:
    """A lesson in each state; the later states first, so that none is claimed on the way."""
    await trained_at(store, await a_session(store), 1)
    await ready_lessons(store, hint_id="ended")
    await store.drop_lessons_of("ended", LessonDrop.HINT_ENDED)
    await ready_lessons(store)
    assert len(await store.lease(owner=TRAINER, count=1, ttl_s=60.0, lessons=ALL_HINTED)) == 1
    await ready_lessons(store, LessonKind.KEEP)
    at = await recorded(store)
    await store.add_lessons([a_lesson(at), a_lesson(at)])
    [claimed] = await store.claim_lessons(LessonState.SAMPLING, owner="one", limit=1, ttl_s=60.0)
    assert claimed.state is LessonState.SAMPLING


@pytest.mark.parametrize(
    ("statement", "finding"),
    [
        ("UPDATE lessons SET drop_reason = NULL WHERE state = 'dropped'", "without a reason"),
        ("UPDATE lessons SET drop_reason = 'stale' WHERE state = 'ready'", "but are not dropped"),
        ("UPDATE lessons SET trained_version = NULL WHERE state = 'trained'", "in no version"),
        ("UPDATE lessons SET trained_version = 1 WHERE state = 'ready'", "but are not trained"),
        ("UPDATE policy_versions SET abandoned = true", "in an abandoned version"),
        (
            "UPDATE lessons SET claim_owner = NULL, claim_until = NULL WHERE state = 'leased'",
            "leased to nobody",
        ),
        ("UPDATE lessons SET claim_until = NULL WHERE state = 'leased'", "without a deadline"),
        ("UPDATE lessons SET claim_owner = NULL WHERE state = 'leased'", "without an owner"),
        (
            "UPDATE lessons SET claim_owner = 'x', claim_until = 1 WHERE state = 'ready'",
            "in a state that has none",
        ),
        ("DELETE FROM lesson_scores", "without tokens or a score"),
        ("UPDATE lessons SET state = 'scoring' WHERE state = 'sampling'", "score without tokens"),
        ("UPDATE lessons SET hint_id = NULL", "name no hint"),
        ("UPDATE lesson_tokens SET middle_ids = response_ids", "do not match their checksum"),
    ],
)
async def test_each_contradiction_is_found(store: Store, statement: str, finding: str) -> None:
    await in_every_state(store)
    assert await verify_database(store.config) == []
    await store.writer.run(lambda connection: connection.execute(text(statement)))
    problems = await verify_database(store.config)
    assert any("lesson" in problem and finding in problem for problem in problems), problems
