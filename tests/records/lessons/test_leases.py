"""Batches of turns and lessons: their parts, their shares, and what a step makes of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from records.errors import StoreConflict
from records.hints.types import Examination, HintStatus, RehearsalBlock
from records.lessons.names import LessonDrop, LessonKind, LessonState
from records.names import DropReason, TurnState
from records.store import Store
from records.training.share import UNCAPPED, LessonShares, Share
from records.types import ReadySample
from tests.records.builders import (
    OWNER,
    REPLY,
    TRAINER,
    a_result,
    a_score,
    a_session,
    a_turn,
    a_verdict,
    a_version,
    claimed,
    recorded,
    state_of,
    turn_in,
)
from tests.records.conftest import Clock
from tests.records.hints.test_memory import objected
from tests.records.lessons.builders import HINT_ID, a_lesson, lesson_state, ready_lessons

HINT, COUNTER, KEEP = LessonKind.HINT, LessonKind.COUNTER, LessonKind.KEEP
SHARES = LessonShares(counter=0.25, keep=0.25, hold_s=0.0)


async def ready_turns(store: Store, count: int, scope: str = "key") -> list[str]:
    """`count` ready turns of a scope. No other may wait to be judged or scored."""
    ids = []
    for _ in range(count):
        turn = a_turn(await a_session(store, scope))
        await store.record_turn(turn, scope=scope)
        await store.set_next_state(turn.turn_id, [REPLY])
        ids.append(turn.turn_id)
    assert len(await claimed(store, TurnState.JUDGING, limit=count)) == count
    for turn_id in ids:
        await store.commit_verdict(OWNER, a_verdict(turn_id), None)
    assert len(await claimed(store, TurnState.SCORING, limit=count)) == count
    for turn_id in ids:
        await store.commit_scores(OWNER, [a_score(turn_id)])
    return ids


async def leased(
    store: Store, count: int = 4, shares: LessonShares = SHARES, share: Share = UNCAPPED
) -> list[ReadySample]:
    return await store.lease(owner=TRAINER, count=count, ttl_s=60.0, lessons=shares, share=share)


def kinds(samples: list[ReadySample]) -> Counter[LessonKind | None]:
    return Counter(sample.lesson for sample in samples)


@pytest.mark.parametrize(
    ("count", "counter", "keep", "parts"),
    [
        (16, 0.375, 0.125, (6, 2)),
        (4, 0.25, 0.25, (1, 1)),
        (1, 0.375, 0.125, (0, 0)),
        (1, 0.6, 0.4, (0, 0)),
        (2, 0.5, 0.5, (1, 0)),
    ],
)
def test_a_batch_has_parts_and_always_a_hinted_one(
    count: int, counter: float, keep: float, parts: tuple[int, int]
) -> None:
    assert LessonShares(counter=counter, keep=keep).of(count) == parts


def test_kinds_that_are_not_there_give_their_places_on() -> None:
    shares = LessonShares()
    assert shares.of(16, has_keep=False) == (10, 0)
    assert shares.of(16, has_counter=False) == (0, 4)
    assert shares.of(16, has_counter=False, has_keep=False) == (0, 0)


async def test_a_part_that_cannot_be_filled_keeps_the_whole_batch_back(store: Store) -> None:
    await ready_lessons(store, HINT, 3)
    await ready_lessons(store, COUNTER, 2)
    at = await recorded(store)
    await store.add_lessons([a_lesson(at, kind=KEEP, hint_id=None)])
    [turn_id] = await ready_turns(store, 1)
    assert await leased(store) == [], "the keep-lesson is not ready yet"
    assert await state_of(store, turn_id) is TurnState.READY


async def test_each_part_is_filled(store: Store) -> None:
    hints = sorted(await ready_lessons(store, HINT, 3))
    first = min(await ready_lessons(store, COUNTER, 2))
    [keep] = await ready_lessons(store, KEEP, 1)
    [turn_id] = await ready_turns(store, 1)
    samples = await leased(store)
    assert [sample.turn_id for sample in samples] == [turn_id, hints[0], first, keep]
    assert [sample.lesson for sample in samples] == [None, HINT, COUNTER, KEEP]
    assert [sample.hint_id for sample in samples] == [None, HINT_ID, HINT_ID, None]
    assert await store.lesson_counts() == {
        (HINT, LessonState.LEASED): 1,
        (HINT, LessonState.READY): 2,
        (COUNTER, LessonState.LEASED): 1,
        (COUNTER, LessonState.READY): 1,
        (KEEP, LessonState.LEASED): 1,
    }
    assert await leased(store) == [], "there is no further keep-lesson"


async def test_a_leased_lesson_is_a_sample_with_one_teaching(store: Store) -> None:
    [lesson_id] = await ready_lessons(store)
    [sample] = await leased(store, 1)
    stored = await store.lesson(lesson_id)
    assert stored is not None
    assert stored.sample is not None
    assert stored.score is not None
    assert (sample.turn_id, sample.session_id) == (lesson_id, lesson_id)
    [teaching] = sample.teachings
    np.testing.assert_array_equal(sample.prompt_ids, stored.sample.prompt_ids)
    np.testing.assert_array_equal(teaching.hinted_prompt_ids, stored.score.teacher_prompt_ids)
    np.testing.assert_array_equal(sample.teacher_logprobs, stored.score.teacher_logprobs)
    assert teaching.topk_ids is not None
    np.testing.assert_array_equal(teaching.topk_ids, stored.score.topk_ids)
    assert (sample.temperature, sample.hint, sample.reward) == (1.0, stored.score.hint, None)


async def test_a_batch_without_a_hinted_sample_leaves_turns_where_they_are(store: Store) -> None:
    await ready_lessons(store, HINT, 3)
    await ready_lessons(store, COUNTER, 3)
    await ready_lessons(store, KEEP, 1)
    await ready_lessons(store, KEEP, 1, hint_id=HINT_ID)
    [turn_id] = await ready_turns(store, 1)
    shares = LessonShares(counter=0.25, keep=0.25, hinted=False)
    samples = await leased(store, shares=shares)
    assert kinds(samples) == {COUNTER: 2, KEEP: 2}
    assert [one.hint_id for one in samples if one.lesson is KEEP] == [None, HINT_ID]
    assert await state_of(store, turn_id) is TurnState.READY


async def test_lessons_that_hold_a_version_are_dropped_unless_a_step_has_them(store: Store) -> None:
    held = {"hint_id": HINT_ID}
    [ready] = await ready_lessons(store, KEEP, **held)
    [other] = await ready_lessons(store, KEEP)
    [hinted] = await ready_lessons(store, HINT)
    assert await store.drop_held_lessons() == 1
    found = await store.lesson(ready)
    assert found is not None
    assert found.drop_reason is LessonDrop.STALE
    assert [await lesson_state(store, one) for one in (other, hinted)] == [LessonState.READY] * 2
    assert await store.drop_held_lessons() == 0
    [last] = await ready_lessons(store, KEEP, **held)
    shares = LessonShares(counter=0.0, keep=0.67)
    assert len(await leased(store, 3, shares=shares)) == 3
    assert await store.drop_held_lessons() == 0
    assert await lesson_state(store, last) is LessonState.LEASED


async def test_without_shares_lessons_stay_where_they_are(store: Store) -> None:
    await ready_lessons(store, HINT, 4)
    assert await store.lease(owner=TRAINER, count=4, ttl_s=60.0) == []
    [turn_id] = await ready_turns(store, 1)
    [sample] = await store.lease(owner=TRAINER, count=1, ttl_s=60.0)
    assert sample.turn_id == turn_id


async def test_no_hint_is_rehearsed_turns_train_alone_and_with_keep_lessons_that_are_ready(
    store: Store,
) -> None:
    await ready_turns(store, 7)
    assert kinds(await leased(store)) == {None: 4}
    await ready_lessons(store, KEEP, 1)
    assert kinds(await leased(store)) == {None: 3, KEEP: 1}


async def test_what_ended_hints_taught_goes_back_in_steps_of_keep_lessons_alone(
    store: Store,
) -> None:
    await ready_lessons(store, HINT, 2)
    await store.drop_lessons_of(HINT_ID, LessonDrop.HINT_ENDED)
    await ready_lessons(store, KEEP, 3)
    assert await leased(store) == [], "a keep-lesson is missing"
    await ready_lessons(store, KEEP, 5)
    assert kinds(await leased(store)) == {KEEP: 4}
    [turn_id] = await ready_turns(store, 1)
    samples = await leased(store)
    assert kinds(samples) == {None: 1, KEEP: 3}, "turns that are ready come along"
    assert samples[0].turn_id == turn_id


async def test_no_step_is_of_keep_lessons_alone_while_a_hint_is_practised(store: Store) -> None:
    await ready_lessons(store, KEEP, 8)
    await ready_lessons(store, HINT, 1)
    assert await leased(store) == []
    await store.drop_lessons_of(HINT_ID, LessonDrop.HINT_ENDED)
    assert kinds(await leased(store)) == {KEEP: 4}


async def test_a_step_begins_without_turns(store: Store) -> None:
    for kind, count in ((HINT, 2), (COUNTER, 1), (KEEP, 1)):
        await ready_lessons(store, kind, count)
    assert kinds(await leased(store)) == {HINT: 2, COUNTER: 1, KEEP: 1}


async def test_turns_wait_for_the_next_lessons_just_after_a_step(
    store: Store, clock: Clock
) -> None:
    """All lessons are trained, and the next are being planned: no step goes without them."""
    for kind, count in ((HINT, 2), (COUNTER, 1), (KEEP, 1)):
        await ready_lessons(store, kind, count)
    samples = await leased(store)
    clock.now += 1000.0  # a long step
    await store.commit_step(
        version=a_version(1), results=[], lessons=[a_result(one.turn_id) for one in samples]
    )
    await ready_turns(store, 4)
    assert await leased(store) == []
    clock.now += SHARES.wait_s + 1
    assert kinds(await leased(store)) == {None: 4}


async def test_turns_go_alone_where_lessons_do_not_come(store: Store, clock: Clock) -> None:
    await ready_lessons(store, HINT, 1)
    await ready_lessons(store, COUNTER, 1)
    await ready_turns(store, 8)
    assert await leased(store, 4, replace(SHARES, keep=0.5)) == []
    assert kinds(await leased(store, 8, replace(SHARES, alone=True))) == {None: 8}
    assert await store.release_leases(TRAINER) == 8
    clock.now += SHARES.wait_s + 1
    await store.drop_lessons_of(HINT_ID, LessonDrop.STALE)
    await ready_lessons(store, HINT, 1)
    clock.now += SHARES.wait_s + 1
    assert kinds(await leased(store, 8)) == {None: 8}, "nobody has made a lesson for a minute"


async def test_one_scope_has_its_share_of_turns_and_lessons_together(
    store: Store, clock: Clock
) -> None:
    await ready_lessons(store, HINT, 6, scope="many")
    [few] = await ready_lessons(store, HINT, 1, scope="few")
    turns = await ready_turns(store, 3, "many")
    share = Share(most=0.5, wait_s=60.0)
    shares = LessonShares(counter=0.0, keep=0.0, hold_s=0.0)
    assert await leased(store, 8, shares, share) == [], "4 of many, 1 of few"
    samples = await leased(store, 5, shares, share)
    assert samples == [], "2 of many, 1 of few: their turns alone are more than the share"
    clock.now += 61
    samples = await leased(store, 5, shares, share)
    ids = [sample.turn_id for sample in samples]
    assert set(turns) <= set(ids)
    assert few in ids


async def test_scopes_take_turns_in_every_part(store: Store) -> None:
    for kind in (HINT, COUNTER, KEEP):
        for scope in ("a", "b"):
            await ready_lessons(store, kind, 4, scope=scope)
    samples = await leased(store, 8)
    found = Counter()
    for sample in samples:
        lesson = await store.lesson(sample.turn_id)
        assert lesson is not None
        found[(lesson.kind, lesson.scope)] += 1
    assert found == {
        (HINT, "a"): 2,
        (HINT, "b"): 2,
        (COUNTER, "a"): 1,
        (COUNTER, "b"): 1,
        (KEEP, "a"): 1,
        (KEEP, "b"): 1,
    }


async def test_a_step_trains_turns_and_lessons_in_one_transaction(store: Store) -> None:
    [lesson_id] = await ready_lessons(store)
    turn_id = await turn_in(store, TurnState.READY)
    assert len(await leased(store, 2, LessonShares(counter=0, keep=0, hold_s=0))) == 2
    version, results = a_version(1), [a_result(turn_id)]
    unleased = a_result("another")
    with pytest.raises(StoreConflict, match="1 lessons, but only 0"):
        await store.commit_step(version=version, results=results, lessons=[unleased])
    assert await state_of(store, turn_id) is TurnState.LEASED
    assert await store.latest_version() is None
    lessons = [a_result(lesson_id)]
    await store.commit_step(version=version, results=results, lessons=lessons)
    await store.commit_step(version=version, results=results, lessons=lessons)
    assert await state_of(store, turn_id) is TurnState.TRAINED
    lesson = await store.lesson(lesson_id)
    assert lesson is not None
    assert (lesson.state, lesson.trained_version) == (LessonState.TRAINED, 1)
    assert await leased(store, 1) == []


async def test_leases_are_held_given_back_and_run_out(store: Store, clock: Clock) -> None:
    [lesson_id] = await ready_lessons(store)
    assert len(await leased(store, 1)) == 1
    clock.now += 50
    assert await store.extend_leases(TRAINER, 60.0) == 1
    clock.now += 50
    assert await leased(store, 1) == []
    clock.now += 20
    assert len(await leased(store, 1)) == 1, "its deadline has passed"
    assert await store.release_leases("another") == 0
    assert await store.release_leases(TRAINER) == 1
    assert await lesson_state(store, lesson_id) is LessonState.READY
    assert len(await leased(store, 1)) == 1
    assert await store.drop_lesson(TRAINER, lesson_id, LessonDrop.BELOW_NOISE)
    assert await store.lesson_drops() == {LessonDrop.BELOW_NOISE: 1}


async def test_a_lesson_whose_hint_ends_during_the_step_does_not_become_ready_again(
    store: Store,
) -> None:
    lesson_ids = await ready_lessons(store, HINT, 2)
    assert len(await leased(store, 2, LessonShares(counter=0, keep=0, hold_s=0))) == 2
    assert await store.drop_lessons_of(HINT_ID, LessonDrop.HINT_ENDED) == 0
    assert await store.release_leases(TRAINER) == 2
    for lesson_id in lesson_ids:
        lesson = await store.lesson(lesson_id)
        assert lesson is not None
        assert (lesson.state, lesson.drop_reason) == (LessonState.DROPPED, LessonDrop.HINT_ENDED)


async def test_reconciling_makes_lessons_equal_to_the_chain(store: Store) -> None:
    [kept] = await ready_lessons(store)
    await leased(store, 1)
    await store.commit_step(version=a_version(1), results=[], lessons=[a_result(kept)])
    [lost] = await ready_lessons(store)
    await leased(store, 1)
    await store.commit_step(version=a_version(2), results=[], lessons=[a_result(lost)])
    [unheard, given_back] = await ready_lessons(store, HINT, 2)
    await leased(store, 2, LessonShares(counter=0, keep=0, hold_s=0))
    versions = [(a_version(1), []), (a_version(3, parent=1), [])]
    chain = [(a_version(1), [kept]), (a_version(3, parent=1), [unheard, "elsewhere"])]
    report = await store.reconcile(versions, chain)
    assert (report.versions_added, report.versions_abandoned) == ((3,), (2,))
    assert (report.lessons_dropped, report.lessons_marked_trained) == (1, 1)
    assert (report.leases_released, report.unknown_lessons) == (2, ("elsewhere",))
    assert await lesson_state(store, kept) is LessonState.TRAINED
    assert await lesson_state(store, unheard) is LessonState.TRAINED
    assert await lesson_state(store, given_back) is LessonState.READY
    found = await store.lesson(lost)
    assert found is not None
    assert (found.state, found.drop_reason) == (LessonState.DROPPED, LessonDrop.STALE)
    again = await store.reconcile(versions, chain)
    assert (again.lessons_dropped, again.lessons_marked_trained) == (0, 0)
    with pytest.raises(StoreConflict, match="trained twice"):
        await store.reconcile(versions, [(a_version(1), [kept]), (a_version(3, parent=1), [kept])])


async def one_hint(store: Store, **found: Any) -> str:
    """The only hint, examined: all turns of `ready_turns` gave it."""
    [hint] = await store.claim_hints(owner=OWNER, limit=2, ttl_s=60)
    examination = Examination(hint_id=hint.hint_id, **found)
    assert await store.commit_examination(OWNER, examination)
    return hint.hint_id


async def test_turns_wait_until_their_hint_is_practised(store: Store) -> None:
    holding = replace(SHARES, hold_s=600.0)
    await ready_turns(store, 4)
    assert await leased(store, 4, holding) == [], "nobody has examined it"
    hint_id = await one_hint(store, is_rule=True)
    assert await leased(store, 4, holding) == [], "its exceptions are being tried"
    await store.set_hint_gap(hint_id, gap=0.5, gap_high=0.6, first=True)
    assert await leased(store, 4, holding) == [], "its first lessons are being made"
    await ready_lessons(store, COUNTER, 2, hint_id=hint_id)
    assert kinds(await leased(store, 4, holding)) == {None: 2, COUNTER: 2}


async def test_turns_of_a_hint_that_rests_wait_for_its_counter_lessons(store: Store) -> None:
    holding = replace(SHARES, hold_s=600.0)
    await ready_turns(store, 4)
    hint_id = await one_hint(store, is_rule=True)
    await ready_lessons(store, COUNTER, 2, hint_id=hint_id)
    await store.set_hint_status(hint_id, HintStatus.RESTING, "learned")
    await store.drop_lessons_of(hint_id, LessonDrop.HINT_ENDED)
    assert await store.hints_of_ready_turns() == {hint_id}
    assert await leased(store, 4, holding) == []
    await store.add_lessons([a_lesson(await recorded(store), kind=COUNTER, hint_id=hint_id)])
    assert await leased(store, 4, holding) == [], "it is still being sampled"
    await store.drop_lessons_of(hint_id, LessonDrop.HINT_ENDED)
    await ready_lessons(store, COUNTER, 2, hint_id=hint_id)
    assert kinds(await leased(store, 4, holding)) == {None: 2, COUNTER: 2}
    assert len(await store.hints_of_ready_turns()) == 1


async def test_turns_of_a_hint_that_rests_without_exceptions_do_not_wait(store: Store) -> None:
    await ready_turns(store, 4)
    hint_id = await one_hint(store, is_rule=True)
    await store.set_hint_status(hint_id, HintStatus.RESTING, "learned")
    assert kinds(await leased(store, 4, replace(SHARES, hold_s=600.0))) == {None: 4}


async def test_turns_of_a_hint_that_is_never_practised_do_not_wait(store: Store) -> None:
    await ready_turns(store, 4)
    await one_hint(store, block=RehearsalBlock.NO_STATES, num_sessions=4)
    assert kinds(await leased(store, 4, replace(SHARES, hold_s=600.0))) == {None: 4}


async def test_one_session_that_asks_for_no_rule_trains(store: Store) -> None:
    await ready_turns(store, 1)
    await one_hint(store, block=RehearsalBlock.NOT_A_RULE, num_sessions=1)
    assert await store.drop_unguarded() == 0
    assert kinds(await leased(store, 1, replace(SHARES, hold_s=600.0))) == {None: 1}


async def test_several_sessions_do_not_teach_what_nothing_guards(
    store: Store, clock: Clock
) -> None:
    turn_ids = await ready_turns(store, 4)
    await one_hint(store, block=RehearsalBlock.NOT_A_RULE, num_sessions=4)
    clock.now += 601
    assert await leased(store, 4, replace(SHARES, hold_s=600.0)) == []
    assert await store.drop_unguarded() == 4
    assert {one.drop_reason for one in await store.load_turns(turn_ids)} == {
        DropReason.HINT_UNGUARDED
    }
    assert await store.drop_unguarded() == 0


async def test_turns_of_a_hint_that_another_scope_opposes_wait_for_somebody(
    store: Store, clock: Clock
) -> None:
    holding = replace(SHARES, hold_s=600.0)
    await ready_turns(store, 4)
    await objected(store, "the opposite", scope="theirs")
    mine, theirs = await store.claim_hints(owner=OWNER, limit=2, ttl_s=60)
    for hint, opposed in ((mine, ()), (theirs, (mine.hint_id,))):
        found = Examination(hint_id=hint.hint_id, is_rule=True, opposed_elsewhere=opposed)
        assert await store.commit_examination(OWNER, found)
    clock.now += 601
    assert await leased(store, 4, holding) == []
    assert await store.delete_hint(theirs.hint_id) is not None
    [again] = await store.claim_hints(owner=OWNER, limit=2, ttl_s=60)
    found = Examination(hint_id=again.hint_id, block=RehearsalBlock.NO_STATES)
    assert await store.commit_examination(OWNER, found)
    assert kinds(await leased(store, 4, holding)) == {None: 4}


async def test_turns_do_not_wait_for_ever_for_a_judge(store: Store, clock: Clock) -> None:
    holding = replace(SHARES, hold_s=600.0)
    await ready_turns(store, 4)
    clock.now += 599
    assert await leased(store, 4, holding) == []
    clock.now += 2
    assert kinds(await leased(store, 4, holding)) == {None: 4}
