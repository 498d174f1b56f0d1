"""Steps of turns and lessons: what they train, what their noise floor sees, what they report."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest

from opd.run.checks import lessons_problem
from records.hints.types import Examination, RehearsalBlock
from records.lessons.names import LessonDrop, LessonKind, LessonState
from records.lessons.types import LessonSample, LessonScore, NewLesson
from records.names import TurnState
from records.store import Store
from records.types import VersionSpan
from rollout_bridge.rehearsal.config import RehearsalConfig
from rollout_bridge.rehearsal.journal import Journal
from tests.records.looking import list_turns
from tests.records.new_store import new_store
from tests.rollout_bridge.rehearsal.test_journal import a_row
from tests.trainer.local_engine import LocalEngine
from tests.trainer.step.test_loop import samples, settings
from tests.trainer.tiny import VOCAB, load, make_ready, states
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.checkpoints.manifest import Manifest
from trainer.errors import StartupError
from trainer.step.leasing import FINISH_FILE
from trainer.step.loop import EmbeddedTrainer
from trainer.step.update import Updater

HINT, COUNTER, KEEP = LessonKind.HINT, LessonKind.COUNTER, LessonKind.KEEP
SHARES = {"lesson_counter_share": 0.25, "lesson_keep_share": 0.25, "hint_wait_s": 0.0}


@asynccontextmanager
async def rehearsing(run: Path, folder: Path, **options):
    async with await Store.open(new_store(run / "records.db")) as store:
        trainer = await EmbeddedTrainer.open(
            store=store,
            config=settings(**(SHARES | options)),
            run_folder=run,
            model=str(folder),
            engines={"policy": LocalEngine(str(folder))},
            rehearsal=RehearsalConfig(enabled=True),
        )
        try:
            yield trainer, store
        finally:
            await trainer.close()


async def make_lessons(store: Store, kind: LessonKind, count: int, version: int = 0) -> list[str]:
    """`count` ready lessons at a turn that is stored."""
    [turn, *_] = await list_turns(store)
    prompt_ids, _ = await store.turn_tokens(turn.turn_id)
    new = [
        NewLesson(
            lesson_id=uuid4().hex,
            kind=kind,
            scope="test",
            hint_id=None if kind is KEEP else "hint",
            state_turn_id=turn.turn_id,
            prompt_id=None,
        )
        for _ in range(count)
    ]
    await store.add_lessons(new)
    generator = np.random.default_rng(0)
    for one in await store.claim_lessons(LessonState.SAMPLING, owner="w", limit=count, ttl_s=60):
        sample = LessonSample(
            lesson_id=one.lesson_id,
            prompt_ids=prompt_ids,
            response_ids=generator.integers(0, VOCAB, 5).astype(np.int32),
            rollout_logprobs=(-4.0 + generator.normal(size=5)).astype(np.float32),
            version_spans=(VersionSpan(version=version, start=0, end=5),),
            sampling={"temperature": 1.0},
            finish_reason="stop",
        )
        assert await store.commit_lesson_sample("w", sample)
    for one in await store.claim_lessons(LessonState.SCORING, owner="w", limit=count, ttl_s=60):
        score = LessonScore(
            lesson_id=one.lesson_id,
            hint="in kelvin" if kind is HINT else "",
            teacher="test",
            teacher_version="0",
            teacher_prompt_ids=prompt_ids,
            teacher_logprobs=(-3.0 + generator.normal(size=5)).astype(np.float32),
        )
        assert await store.commit_lesson_score("w", score)
    return [one.lesson_id for one in new]


async def coming(store: Store, kind: LessonKind) -> None:
    """A lesson that waits to be sampled."""
    [turn, *_] = await list_turns(store)
    lesson = NewLesson(
        lesson_id=uuid4().hex,
        kind=kind,
        scope="test",
        hint_id="hint",
        state_turn_id=turn.turn_id,
        prompt_id=None,
    )
    assert await store.add_lessons([lesson]) == 1


async def lesson_states(store: Store, lesson_ids: list[str]) -> set[LessonState]:
    found = [await store.lesson(lesson_id) for lesson_id in lesson_ids]
    return {one.state for one in found if one is not None}


async def test_a_step_of_turns_and_lessons_is_one_version(folder, tmp_path):
    Journal(tmp_path).add(a_row(0))
    async with rehearsing(tmp_path, folder) as (trainer, store):
        await make_ready(store, samples(1)[:1])
        lessons = [
            *await make_lessons(store, HINT, 1),
            *await make_lessons(store, COUNTER, 1),
            *await make_lessons(store, KEEP, 1),
        ]
        report = await trainer.step()
        assert report is not None
        assert report.version == 1
        assert await states(store) == {TurnState.TRAINED: 1}
        assert await lesson_states(store, lessons) == {LessonState.TRAINED}
        assert await trainer.step() is None
        assert await store.lessons_trained_by_hint() == {"hint": {HINT: 1, COUNTER: 1}}
        assert await store.lessons_trained_by_hint(["another"]) == {}
        assert await store.lessons_trained_by_hint(["hint"]) == {"hint": {HINT: 1, COUNTER: 1}}
        trained = dict.fromkeys((HINT, COUNTER, KEEP), 1)
        totals = await store.lesson_totals()
        assert totals == {(kind, LessonState.TRAINED): n for kind, n in trained.items()}
    manifest = Manifest.read(tmp_path / "checkpoints" / "step_000001")
    assert manifest.turn_ids == ("s0-0",)
    assert sorted(manifest.lesson_ids) == sorted(lessons)
    assert manifest.lesson_staleness == (0, 0, 0)
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (line["lessons/hint"], line["lessons/counter"], line["lessons/keep"]) == (1, 1, 1)
    assert line["turns/live"] == 1
    kinds = ("live", "hint", "counter", "keep")
    assert all(line[f"lessons/gap_{kind}"] > 0 for kind in kinds)
    # What was measured of the version before it; what was not has no key.
    assert (line["hints/gap"], line["hints/keep_gap"], line["hints/objections"]) == (0.5, 0.5, 1)
    assert line["hints/measured_version"] == 0
    assert "hints/obedience" not in line
    assert line["lessons/steps_alone"] == line["lessons/ready_hint"] == 0


async def test_turns_wait_for_lessons_and_then_go_alone_and_that_is_counted(folder, tmp_path):
    async with rehearsing(tmp_path, folder, lesson_wait_s=0.3) as (trainer, store):
        await make_ready(store, samples(4))
        await make_lessons(store, HINT, 1)
        await coming(store, COUNTER)
        assert await trainer.step() is None, "the counter-lesson is being sampled"
        report = None
        while report is None:
            report = await trainer.step()
        assert report.metrics["lessons/steps_alone"] == 1
        assert report.metrics["turns/live"] == 4
        assert report.metrics["lessons/ready_hint"] == 1
        assert "lessons/gap_hint" not in report.metrics


async def practised(store: Store) -> str:
    """The hint that turns gave, prepared and measured."""
    [hint] = await store.claim_hints(owner="examiner", limit=1, ttl_s=60)
    found = Examination(hint_id=hint.hint_id, is_rule=True)
    assert await store.commit_examination("examiner", found)
    await store.set_hint_gap(hint.hint_id, gap=0.5, gap_high=0.6, first=True)
    return hint.hint_id


async def test_a_step_waits_for_the_measurement_of_the_version_before_it(
    folder, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("rollout_bridge.rehearsal.mix.SAY_EVERY_S", 0.05)
    journal = Journal(tmp_path)
    journal.add(a_row(0))
    options = {"lesson_wait_s": 0.0}
    async with rehearsing(tmp_path, folder, **options) as (trainer, store):
        await make_ready(store, samples(2))
        await practised(store)
        assert await trainer.step() is not None
        await make_ready(store, samples(2, first=2, version=1))
        for _ in range(4):
            assert await trainer.step() is None, "version 1 is being measured"
            await asyncio.sleep(0.03)
        assert "training waits for the measurement of version 1" in caplog.text
        said = caplog.text.count("training waits")
        assert 1 <= said <= 2, "not at every look"
    # A trainer that starts again has forgotten nothing, and the version after is waited for too.
    async with rehearsing(tmp_path, folder, **options) as (trainer, store):
        assert await trainer.step() is None
        journal.add(a_row(1).model_copy(update={"failure": "open wishes are lost"}))
        assert await trainer.step() is None, "it failed, and is measured again"
        journal.add(a_row(1))
        assert await trainer.step() is not None
        await make_ready(store, samples(2, first=4, version=2))
        assert await trainer.step() is None, "version 2 is being measured"


async def test_nothing_waits_for_a_measurement_where_no_hint_is_practised(folder, tmp_path):
    Journal(tmp_path).add(a_row(0))
    async with rehearsing(tmp_path, folder) as (trainer, store):
        await make_ready(store, samples(4))
        hint_id = await practised(store)
        assert await trainer.step() is not None
        assert await trainer.step() is None
        await store.set_hint_block(hint_id, RehearsalBlock.NO_STATES, "they are gone")
        assert await trainer.step() is not None, "the worker has nothing to measure"


async def test_a_run_that_ends_trains_what_is_left_without_waiting(folder, tmp_path):
    async with rehearsing(tmp_path, folder) as (trainer, store):
        await make_ready(store, samples(1))
        await make_lessons(store, HINT, 1)
        await coming(store, COUNTER)
        assert await trainer.step() is None
        (tmp_path / FINISH_FILE).touch()
        report = await trainer.step()
        assert report is not None
        assert await states(store) == {TurnState.TRAINED: 2}


async def test_lessons_of_old_versions_expire_and_what_cannot_train_is_dropped(folder, tmp_path):
    async with rehearsing(tmp_path, folder, max_staleness=0) as (trainer, store):
        await make_ready(store, samples(2))
        [report, stale] = [await trainer.step(), await make_lessons(store, HINT, 1)]
        assert report is not None
        await make_ready(store, samples(2, first=2, version=1))
        await trainer._leasing.expire(trainer._versions.chain)
        assert await lesson_states(store, stale) == {LessonState.DROPPED}
        wants_topk = {"objective": {"name": "forward_kl_topk"}}
    async with rehearsing(tmp_path, folder, **wants_topk) as (trainer, store):
        await make_lessons(store, HINT, 2, version=1)
        await make_lessons(store, COUNTER, 1, version=1)
        await make_lessons(store, KEEP, 1, version=1)
        assert await trainer.step() is None, "its teacher's top-k is missing"
        drops = await store.lesson_drops()
        assert drops[LessonDrop.STALE] == 1
        assert drops[LessonDrop.TEACHER_LOGPROBS_INVALID] >= 2


def test_the_noise_floor_looks_at_hinted_samples_alone(folder):
    """Keep-lessons that agree with the start do not make a hint's lessons noise."""
    policy = load(folder)
    updater = Updater(policy, None, settings(beta_kl=0.0, learning_rate=1e-3))
    one, *others = samples(2)
    own = [own_logprobs_of(policy, other) for other in others]
    kept = [
        dataclasses.replace(other, teacher_logprobs=logprobs, lesson=KEEP)
        for other, logprobs in zip(others, own, strict=True)
    ]
    hinted = dataclasses.replace(one, lesson=HINT, hint_id="hint")
    gap = updater.rehearse([hinted]).mean_gap
    updater.noise = 0.5 * gap / updater.config.noise_floor_factor
    report = updater.update([hinted, *kept], 0)
    assert report.metrics["teacher_student_absdiff"] < 0.5 * gap, "a mean over all would be noise"
    assert report.skipped is None
    assert report.metrics["lessons/gap_hint"] == pytest.approx(gap)
    assert report.metrics["lessons/gap_keep"] < 1e-3
    agreed = [dataclasses.replace(kept[0], lesson=HINT), dataclasses.replace(one, lesson=COUNTER)]
    updater = Updater(load(folder), None, settings(beta_kl=0.0), noise=1e-3)
    report = updater.update(agreed, 0)
    assert report.skipped is not None, "what is hinted teaches nothing"


def own_logprobs_of(policy, one) -> np.ndarray:
    from trainer.calibration.calibrate import own_logprobs

    ids = np.concatenate([one.prompt_ids, one.response_ids])
    found = own_logprobs(policy, policy.device)(ids)
    return np.asarray(found)[-len(one.response_ids) :].astype(np.float32)


def test_settings_that_cannot_train_lessons_are_named(folder):
    assert lessons_problem(settings()) is None
    assert lessons_problem(settings(teacher={"kind": "frozen"})) is None
    assert "drawn for turns" in str(lessons_problem(settings(objective={"name": "side_samples"})))
    assert "follows the policy" in str(lessons_problem(settings(teacher={"kind": "ema"})))
    replaced = {"mix": "replace", "pass_rate_threshold": 0.5, "reward_coef": 1.0}
    assert "mix = replace" in str(lessons_problem(settings(objective=replaced)))
    added = {"pass_rate_threshold": 0.5, "reward_coef": 1.0}
    assert "pass_rate_threshold" in str(lessons_problem(settings(objective=added)))


async def test_a_trainer_that_cannot_train_lessons_does_not_start(folder, tmp_path):
    with pytest.raises(StartupError, match="drawn for turns"):
        async with rehearsing(tmp_path, folder, objective={"name": "side_samples"}):
            pass


def test_shares_must_leave_something_for_hints():
    with pytest.raises(ValueError, match="leave nothing for hints"):
        settings(lesson_counter_share=0.6, lesson_keep_share=0.4)


def test_a_manifest_without_lessons_is_what_it_was_before_there_were_any(folder, tmp_path):
    [root] = Checkpoints(tmp_path / "checkpoints", str(folder), seed=0).open()
    assert b"lesson" not in root.to_bytes()
    assert Manifest.read(tmp_path / "checkpoints" / "step_000000") == root
    with pytest.raises(ValueError, match="occurs twice"):
        dataclasses.replace(root, lesson_ids=("a", "a"), lesson_staleness=(0, 0))
