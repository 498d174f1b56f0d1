"""Batches of turns and lessons for slime: when there is one, what a restart makes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from records.errors import StoreUnavailable
from records.hints.types import Examination
from records.lessons.names import LessonDrop, LessonKind, LessonState
from records.names import TurnState
from records.store import Store
from rollout_bridge.rehearsal.journal import Journal
from rollout_bridge.slime.handovers import HandoverLog
from rollout_bridge.slime.settings import SlimeConfigError, read_settings
from rollout_bridge.slime.source import LeasedTurns, TurnSource
from rollout_bridge.stop_order import STOP_FILE, StopOrder, order_stop
from tests.records.builders import state_of, turn_in
from tests.records.lessons.builders import lesson_state, ready_lessons
from tests.records.new_store import new_store
from tests.rollout_bridge.rehearsal.test_journal import a_row
from tests.rollout_bridge.slime.runs import run_values, slime_args
from tests.rollout_bridge.slime.test_source import Clock, Run, sampled_at

HINT, COUNTER, KEEP = LessonKind.HINT, LessonKind.COUNTER, LessonKind.KEEP
TRAINER = {"lesson_counter_share": 0.25, "lesson_keep_share": 0.25, "hint_wait_s": 0.0}
SCHEDULE = {"schedule": "async"}


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    values = run_values(
        tmp_path, trainer=TRAINER | SCHEDULE, rehearsal={"enabled": True}, handover={}
    )
    (tmp_path / "config.toml").write_text(tomli_w.dumps(values))
    clock = Clock()
    async with await Store.open(new_store(tmp_path / "records.db"), clock) as store:
        yield Run(tmp_path, store, clock)


async def lessons_for(run: Run, version: int, hints: int = 1) -> list[str]:
    """Ready lessons that fill what a turn leaves of a batch of four."""
    made = [(HINT, hints), (COUNTER, 1), (KEEP, 1)]
    return [
        one
        for kind, count in made
        for one in await ready_lessons(run.store, kind, count, version=version)
    ]


async def practised(store: Store) -> str:
    """A hint that turns gave, examined and measured: each version is measured from now on."""
    await turn_in(store, TurnState.READY)
    [hint] = await store.claim_hints(owner="examiner", limit=1, ttl_s=60)
    found = Examination(hint_id=hint.hint_id, is_rule=True)
    assert await store.commit_examination("examiner", found)
    await store.set_hint_gap(hint.hint_id, gap=0.5, gap_high=0.6, first=True)
    return hint.hint_id


def measured(run: Run, version: int, **changes: Any) -> None:
    Journal(run.folder).add(a_row(version).model_copy(update=changes))


async def still_waits(task: asyncio.Task[LeasedTurns]) -> None:
    await asyncio.sleep(0.5)
    assert not task.done()


async def test_a_batch_has_turns_and_lessons_and_its_checkpoint_trains_both(run: Run) -> None:
    source = await run.job()
    [turn_id] = await run.ready(1, **sampled_at(1))
    lessons = await lessons_for(run, 1)
    batch = await source.next_batch(0)
    assert {sample.turn_id for sample in batch.samples} == {turn_id, *lessons}
    assert batch.version_gaps == [0] * 4
    assert batch.rate == 1.0
    found = [batch.metrics[f"lessons/{kind.value}"] for kind in LessonKind]
    assert (batch.metrics["handover/turns"], found) == (1, [1, 1, 1])
    [_, record] = HandoverLog(run.folder).chain(0)
    assert (record.turn_ids, set(record.lesson_ids)) == ((turn_id,), set(lessons))
    assert {await lesson_state(run.store, one) for one in lessons} == {LessonState.LEASED}
    await source.checkpointed(0)
    assert await state_of(run.store, turn_id) is TurnState.TRAINED
    assert {await lesson_state(run.store, one) for one in lessons} == {LessonState.TRAINED}


async def test_leases_of_lessons_are_held_too(run: Run) -> None:
    source = await run.job()
    await run.ready(1, **sampled_at(1))
    lessons = await lessons_for(run, 1)
    await source.next_batch(0)
    run.clock.now += 10_000
    await source._held.extend()
    run.clock.now += 500
    assert await run.store.lease(owner="another", count=1, ttl_s=60.0) == []
    assert {await lesson_state(run.store, one) for one in lessons} == {LessonState.LEASED}


@pytest.mark.parametrize("is_marked", [True, False])
async def test_a_resumed_job_knows_the_lessons_of_its_checkpoint(run: Run, is_marked: bool) -> None:
    source = await run.job()
    await run.ready(1, **sampled_at(1))
    trained = await lessons_for(run, 1)
    await source.next_batch(0)
    await run.ready(1, **sampled_at(2))
    lost = await lessons_for(run, 2)
    await source.next_batch(1)
    if is_marked:
        await source.checkpointed(1)
    await run.job(0, 3)
    assert {await lesson_state(run.store, one) for one in trained} == {LessonState.TRAINED}
    # What only lost weights trained is sampled anew; what was only leased is ready again.
    wanted = LessonState.DROPPED if is_marked else LessonState.READY
    assert {await lesson_state(run.store, one) for one in lost} == {wanted}


async def test_the_next_batch_waits_until_its_version_is_measured(run: Run) -> None:
    source = await run.job()
    await practised(run.store)
    await run.ready(3, **sampled_at(1))
    waiting = asyncio.create_task(source.next_batch(0))
    await still_waits(waiting)
    measured(run, 1, failure="open wishes are lost")
    await still_waits(waiting)
    measured(run, 1)
    assert len((await waiting).samples) == 4


async def test_no_part_of_a_batch_is_taken_while_a_hint_is_practised(run: Run) -> None:
    """What a smaller one lacks are lessons that keep open wishes."""
    source = await run.job()
    await practised(run.store)
    measured(run, 1)
    await run.ready(1, **sampled_at(1))
    waiting = asyncio.create_task(source.next_batch(0))
    await still_waits(waiting)
    await lessons_for(run, 1, hints=2)
    assert len((await waiting).samples) == 4


async def test_little_traffic_trains_without_hints_that_are_practised(run: Run) -> None:
    source = await run.job()
    turn_ids = await run.ready(2, **sampled_at(1))
    batch = await source.next_batch(0)
    assert [sample.turn_id for sample in batch.samples] == turn_ids
    # slime asks one batch after the other, so no weights wait for the next one.
    waiting = asyncio.create_task(source.next_batch(1))
    await still_waits(waiting)
    waiting.cancel()


async def test_a_step_is_smaller_after_versions_that_lost_many_open_wishes(run: Run) -> None:
    source = await run.job()
    await practised(run.store)
    measured(run, 1, deep_falls=2)
    await run.ready(3, **sampled_at(1))
    assert (await source.next_batch(0)).rate == 0.25


async def test_a_batch_with_something_unusable_goes_back_whole(run: Run) -> None:
    values = run_values(
        run.folder, trainer=TRAINER, rehearsal={"enabled": True}, handover={"max_wait_s": 60.0}
    )
    (run.folder / "config.toml").write_text(tomli_w.dumps(values))
    needs = {"teacher": True, "reward": False, "compared": False, "top_k": 4}
    source = await run.job(hindsight_needs=needs)
    await run.ready(1, **sampled_at(1))
    lessons = await lessons_for(run, 1)  # two of the teacher's likeliest tokens each
    waiting = asyncio.create_task(source.next_batch(0))
    async with asyncio.timeout(20):
        while len(await run.store.lesson_drops()) < 1:
            await asyncio.sleep(0.02)
    await still_waits(waiting)
    waiting.cancel()
    states = {await lesson_state(run.store, one) for one in lessons}
    assert states == {LessonState.DROPPED}
    assert await run.store.lesson_drops() == {LessonDrop.TEACHER_LOGPROBS_INVALID: 3}


@pytest.mark.parametrize("rehearses", [True, False])
async def test_a_stop_order_ends_training_until_it_is_removed(
    tmp_path: Path, rehearses: bool, caplog: pytest.LogCaptureFixture
) -> None:
    values = run_values(tmp_path, trainer=TRAINER, rehearsal={"enabled": rehearses})
    (tmp_path / "config.toml").write_text(tomli_w.dumps(values))
    async with await Store.open(new_store(tmp_path / "records.db"), Clock()) as store:
        source = TurnSource(store, read_settings(slime_args(tmp_path)), clock=Clock())
        await source.resume(-1)
        for _ in range(4):
            await turn_in(store, TurnState.READY, **sampled_at(1))
        order_stop(tmp_path, StopOrder(reason="open wishes are lost"))
        waiting = asyncio.create_task(source.next_batch(0))
        await still_waits(waiting)
        assert caplog.text.count("training stops: open wishes are lost") == 1
        (tmp_path / STOP_FILE).unlink()
        assert len((await waiting).samples) == 4


async def test_a_stop_order_lets_a_waiting_update_through(run: Run) -> None:
    values = run_values(run.folder)
    (run.folder / "config.toml").write_text(tomli_w.dumps(values))
    source = await run.job()
    await run.ready(4, **sampled_at(1))
    assert len((await source.next_batch(0)).samples) == 4
    order_stop(run.folder, StopOrder())
    await run.ready(4, **sampled_at(1))
    assert (await source.next_batch(1)).samples == []


@pytest.mark.parametrize(
    ("schedule", "rehearses", "pipelined"),
    [
        ("async", False, True),
        ("step_off", False, True),
        ("sync", False, False),
        ("async", True, False),
    ],
)
def test_which_jobs_prepare_the_next_batch_during_a_step(
    tmp_path: Path, schedule: str, rehearses: bool, pipelined: bool
) -> None:
    trainer = {"schedule": schedule} | ({"steps_off": 1} if schedule == "step_off" else {})
    values = run_values(tmp_path, trainer=trainer, rehearsal={"enabled": rehearses})
    (tmp_path / "config.toml").write_text(tomli_w.dumps(values))
    settings = read_settings(slime_args(tmp_path))
    assert settings.is_pipelined is pipelined
    assert (settings.hold_s is not None) is (schedule == "sync")
    assert (settings.rehearsal is not None) is rehearses


def test_the_shares_of_lessons_are_the_embedded_trainers(tmp_path: Path) -> None:
    from trainer.config import TrainerConfig

    values = run_values(tmp_path, trainer={"lesson_wait_s": 7.0})
    (tmp_path / "config.toml").write_text(tomli_w.dumps(values))
    found = read_settings(slime_args(tmp_path)).lesson_shares
    assert found == TrainerConfig(lesson_wait_s=7.0).lesson_shares


async def test_a_step_ends_once_its_weights_are_served(run: Run) -> None:
    """Long before a checkpoint: the next lessons are made when none is leased."""
    source = await run.job()
    [first] = await run.ready(1, **sampled_at(1))
    trained = await lessons_for(run, 1)
    await source.next_batch(0)
    waiting = asyncio.create_task(source.next_batch(1))
    await still_waits(waiting)
    assert await state_of(run.store, first) is TurnState.TRAINED
    assert {await lesson_state(run.store, one) for one in trained} == {LessonState.TRAINED}
    assert await run.store.lesson_counts() == {}
    assert (await run.store.latest_version()).version == 2
    [second] = await run.ready(1, **sampled_at(2))
    await lessons_for(run, 2)
    assert second in {sample.turn_id for sample in (await waiting).samples}
    # A checkpoint that comes later changes nothing; a job that lost it gives everything back.
    await source.checkpointed(0)
    await run.job(-1, 3)
    assert await run.states([first, second]) == [TurnState.READY] * 2
    assert {await lesson_state(run.store, one) for one in trained} == {LessonState.DROPPED}
    assert await run.store.versions_given_up() >= {2}


async def test_without_lessons_turns_are_trained_by_a_checkpoint_alone(run: Run) -> None:
    values = run_values(run.folder, trainer=SCHEDULE, rehearsal={"enabled": False})
    (run.folder / "config.toml").write_text(tomli_w.dumps(values))
    source = await run.job()
    turn_ids = await run.ready(8, **sampled_at(1))
    await source.next_batch(0)
    await source.next_batch(1)
    assert await run.states(turn_ids) == [TurnState.LEASED] * 8


async def test_a_batch_that_was_handed_over_needs_no_metrics(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = await run.job()
    await run.ready(1, **sampled_at(1))
    await lessons_for(run, 1)

    async def down(samples: object) -> dict[str, float]:
        raise StoreUnavailable("down")

    monkeypatch.setattr(source._lessons, "metrics", down)
    batch = await source.next_batch(0)
    assert batch.metrics["lessons/hint"] == 1
    assert "lessons/ready_hint" not in batch.metrics


async def test_an_outage_ends_with_the_first_answer(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long a measurement takes afterwards, the store was not silent."""
    source = await run.job()
    await run.ready(3, **sampled_at(1))
    await practised(run.store)
    must_wait, released = source._must_wait, []
    release = run.store.release_leases

    async def fails_once() -> bool:
        monkeypatch.setattr(source, "_must_wait", must_wait)
        raise StoreUnavailable("down for a moment")

    async def counted(owner: str) -> int:
        released.append(owner)
        return await release(owner)

    monkeypatch.setattr(source, "_must_wait", fails_once)
    monkeypatch.setattr(run.store, "release_leases", counted)
    waiting = asyncio.create_task(source.next_batch(0))
    await still_waits(waiting)
    measured(run, 1)
    assert len((await waiting).samples) == 4
    assert len(released) == 1, "what the failed attempt may have leased"


def test_lessons_with_the_engines_routing_are_refused(tmp_path: Path) -> None:
    values = run_values(tmp_path, rehearsal={"enabled": True})
    (tmp_path / "config.toml").write_text(tomli_w.dumps(values))
    with pytest.raises(SlimeConfigError, match="--use-rollout-routing-replay"):
        read_settings(slime_args(tmp_path, use_rollout_routing_replay=True))


async def test_what_ended_hints_taught_is_undone_however_late_it_is(run: Run) -> None:
    """Nothing is practised and no agent works: a batch is of keep-lessons alone."""
    source = await run.job()
    waiting = asyncio.create_task(source.next_batch(0))
    await still_waits(waiting)  # longer than `max_wait_s`
    lessons = await ready_lessons(run.store, KEEP, 4, version=1)
    async with asyncio.timeout(20):
        assert {sample.turn_id for sample in (await waiting).samples} == set(lessons)


async def test_lessons_of_withdrawn_versions_stay_trained(run: Run) -> None:
    """Version 2 was served; whether a checkpoint contains it does not matter."""
    source = await run.job()
    [turn_id] = await run.ready(1, **sampled_at(1))
    lessons = await lessons_for(run, 1)
    await source.next_batch(0)
    await run.job(-1, 2, hindsight_rollback={"restores": 1, "parent": 2})
    assert await state_of(run.store, turn_id) is TurnState.TRAINED
    assert {await lesson_state(run.store, one) for one in lessons} == {LessonState.TRAINED}
    assert await run.store.versions_given_up() == {2}
