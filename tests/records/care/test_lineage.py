"""Which versions were trained on a session, told before and after it is deleted."""

from __future__ import annotations

from sqlalchemy import select

from records.care.housekeeping import Housekeeping
from records.care.lineage import DeletedSession
from records.care.rows import DeletionRow
from records.lessons.names import LessonDrop
from records.names import TurnState
from records.store import Store
from tests.records.builders import (
    REPLY,
    SCOPE,
    TRAINER,
    a_result,
    a_session,
    a_turn,
    a_version,
    advance,
    following,
    recorded,
    state_of,
    turn_in,
)
from tests.records.care.test_deletion import forget, session_of
from tests.records.conftest import Clock
from tests.records.hints.test_forgetting import ALL_HINTED, of_two_sessions
from tests.records.hints.test_forgetting import trained as trained_lesson
from tests.records.hints.test_memory import objected
from tests.records.lessons.builders import ready_lessons


async def train(store: Store, turn_id: str) -> None:
    while (state := await state_of(store, turn_id)) is not TurnState.TRAINED:
        await advance(store, turn_id, state)


async def told(keeper: Housekeeping, session_id: str) -> DeletedSession:
    [one] = await keeper.deleted_sessions(session=session_id)
    return one


async def test_each_of_many_sessions_keeps_its_own(store: Store, keeper: Housekeeping) -> None:
    sessions = [await session_of(store, await turn_in(store, TurnState.TRAINED)) for _ in range(3)]
    assert [await keeper.trained_on([one]) for one in sessions] == [[1], [2], [3]]
    gone = await forget(keeper, *sessions[:2])
    assert gone.versions == (1, 2)
    assert [(await told(keeper, one)).versions for one in sessions[:2]] == [(1,), (2,)]
    assert await keeper.versions_built_on([2]) == [2, 3]


async def test_what_retention_deletes_is_told_too(
    store: Store, keeper: Housekeeping, clock: Clock
) -> None:
    session_id = await session_of(store, await turn_in(store, TurnState.TRAINED))
    clock.now += 3 * 86_400.0
    await keeper.expire(max_age_days=2.0)
    one = await told(keeper, session_id)
    assert (one.reason, one.versions, one.is_settled) == ("retention", (1,), True)


async def test_a_deleted_session_is_found_by_its_names_which_are_not_kept(
    store: Store, keeper: Housekeeping
) -> None:
    named = await store.ensure_session(scope=SCOPE, external_id="chat 7")
    await recorded(store, session_id=named, user_id="ann")
    await recorded(store, session_id=named, user_id="bob")
    other = await session_of(store, await recorded(store, user_id="ann"))
    await forget(keeper, named, other)
    found = await keeper.deleted_sessions(user="ann")
    assert sorted(one.session_id for one in found) == sorted([named, other])
    for name in ({"session": "chat 7"}, {"user": "bob"}):
        assert [one.session_id for one in await keeper.deleted_sessions(**name)] == [named]
    assert await keeper.deleted_sessions(session="ann") == []
    assert await keeper.deleted_sessions(user="chat 7") == []
    row = (await store.read(lambda c: c.execute(select(DeletionRow.__table__)).all()))[0]
    assert not {"chat 7", "ann", "bob"} & set(row.name_digests)


async def test_feedback_from_a_session_taught_what_it_was_about(
    store: Store, keeper: Housekeeping
) -> None:
    first = a_turn(await a_session(store))
    await store.record_turn(first, scope=SCOPE)
    second = following(first, session_id=await a_session(store))
    await store.set_next_state(first.turn_id, [REPLY])
    await store.record_turn(second, scope=SCOPE)
    await train(store, first.turn_id)
    assert await keeper.trained_on([second.session_id]) == [1]
    await forget(keeper, second.session_id)
    assert (await told(keeper, second.session_id)).versions == (1,)


async def test_lessons_of_a_sessions_hint_count_wherever_they_were_sampled(
    store: Store, keeper: Housekeeping
) -> None:
    hint_id, first, second = await of_two_sessions(store)
    await trained_lesson(store, hint_id, 1)  # at a state of a third session
    sessions = [await session_of(store, turn_id) for turn_id in (first, second)]
    await forget(keeper, sessions[0])
    await trained_lesson(store, hint_id, 2)  # with the words of the second alone
    await forget(keeper, sessions[1])
    assert (await told(keeper, sessions[0])).versions == (1,)
    assert (await told(keeper, sessions[1])).versions == (1, 2)


async def test_a_step_that_is_taken_during_the_deletion_counts(
    store: Store, keeper: Housekeeping
) -> None:
    hint_id, first, _ = await of_two_sessions(store)
    [lesson_id] = await ready_lessons(store, hint_id=hint_id)
    assert await store.lease(owner=TRAINER, count=1, ttl_s=60, lessons=ALL_HINTED)
    session_id = await session_of(store, first)
    assert (await forget(keeper, session_id)).num_sessions == 1
    one = await told(keeper, session_id)
    assert (one.versions, one.is_settled) == ((), False)
    await store.commit_step(version=a_version(1), results=[], lessons=[a_result(lesson_id)])
    one = await told(keeper, session_id)
    assert (one.versions, one.is_settled) == ((1,), True)
    # It stays so when the lesson goes with the session that it was sampled in.
    lesson = await store.lesson(lesson_id)
    assert lesson is not None
    await forget(keeper, await session_of(store, lesson.state_turn_id))
    assert await store.lesson(lesson_id) is None
    one = await told(keeper, session_id)
    assert (one.versions, one.is_settled) == ((1,), True)


async def test_a_step_that_fails_during_the_deletion_does_not_count(
    store: Store, keeper: Housekeeping
) -> None:
    hint_id, first, _ = await of_two_sessions(store)
    [lesson_id] = await ready_lessons(store, hint_id=hint_id)
    assert await store.lease(owner=TRAINER, count=1, ttl_s=60, lessons=ALL_HINTED)
    session_id = await session_of(store, first)
    await forget(keeper, session_id)
    assert await store.drop_lesson(TRAINER, lesson_id, LessonDrop.FORGOTTEN)
    one = await told(keeper, session_id)
    assert (one.versions, one.is_settled) == ((), True)


async def test_a_hint_that_trained_as_a_turn_alone_counts(
    store: Store, keeper: Housekeeping
) -> None:
    turn_id = await objected(store, "use Celsius")
    session_id = await session_of(store, turn_id)
    await train(store, turn_id)
    await forget(keeper, session_id)
    assert (await told(keeper, session_id)).versions == (1,)


async def test_what_came_back_with_a_backup_keeps_what_was_known(
    store: Store, keeper: Housekeeping
) -> None:
    session_id = await session_of(store, await turn_in(store, TurnState.TRAINED))
    await forget(keeper, session_id)
    await forget(keeper, session_id)  # nothing is stored of it any more
    assert (await told(keeper, session_id)).versions == (1,)
