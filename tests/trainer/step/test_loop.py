import asyncio
import dataclasses
import json
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from opd.processes.roles.trainer_role import train_and_serve
from records.names import DropReason, TurnState
from records.store import Store
from records.training.history.window import HistoryWindow
from rollout_bridge.engine.served import ServedFile
from rollout_bridge.guard.checks import add_check
from rollout_bridge.stop_order import StopOrder, order_stop
from tests.records.new_store import new_store
from tests.rollout_bridge.guard.test_checks import a_check
from tests.spans import kept_spans, said
from tests.trainer.local_engine import LocalEngine
from tests.trainer.tiny import VOCAB, conversation, make_ready, random_sequences, save_model, states
from trainer.checkpoints.manifest import Manifest
from trainer.config import LoraConfig, TrainerConfig
from trainer.errors import CheckpointError, TrainerError
from trainer.schedule.rollback_order import order_rollback
from trainer.step.loop import EmbeddedTrainer

BATCH = 4


def settings(**options) -> TrainerConfig:
    defaults = {
        "rollout_batch_size": BATCH,
        "learning_rate": 1e-3,
        "tensorboard": False,
        "poll_interval_s": 0.01,
        "publish_backoff_s": 0.001,
        "engine_check_interval_s": 0.01,
    }
    return TrainerConfig(**(defaults | options))


def samples(sessions: int, *, first: int = 0, **options) -> list:
    """Two turns a session."""
    return [
        one
        for number in range(first, first + sessions)
        for one in conversation(f"s{number}", [(5, 3), (4, 6)], seed=number, **options)
    ]


@asynccontextmanager
async def opened(run, folder, engine=None, *, guarded=False, teaching=None, **options):
    """`teaching`: the engine that teaches, or several by the names of their teachers."""
    engine = engine or LocalEngine(str(folder))
    engine.served = ServedFile(run)
    run.mkdir(exist_ok=True)
    async with await Store.open(new_store(run / "records.db")) as store:
        trainer = await EmbeddedTrainer.open(
            store=store,
            config=settings(**options),
            run_folder=run,
            model=str(folder),
            engines={"policy": engine},
            guarded=guarded,
            teachers=teaching.get if isinstance(teaching, dict) else lambda _: teaching,
        )
        try:
            yield trainer, store, engine
        finally:
            await trainer.close()


def final_weights(run, version: int) -> dict[str, torch.Tensor]:
    """Of full weights, or of the adapter."""
    (file,) = (run / "checkpoints" / f"step_{version:06d}").glob("*.safetensors")
    return load_file(file)


async def test_a_full_batch_becomes_a_version_that_the_engine_serves(folder, tmp_path):
    async with opened(tmp_path, folder) as (trainer, store, engine):
        assert await trainer.step() is None
        await make_ready(store, samples(1))
        assert await trainer.step() is None, "half a batch must wait"
        await make_ready(store, samples(2, first=1))
        report = await trainer.step()
        assert report is not None
        assert report.version == trainer.version == 1
        assert await trainer.step() is None, "the rest waits for the next full batch"
        assert engine.version == "1"
        assert not engine.paused
        assert await states(store) == {TurnState.TRAINED: BATCH, TurnState.READY: 2}
        latest = await store.latest_version()
        assert latest is not None
        assert (latest.version, latest.parent_version) == (1, 0)
        assert latest.checkpoint == "checkpoints/step_000001"
        manifest = Manifest.read(tmp_path / "checkpoints" / "step_000001")
        assert manifest.hash == latest.manifest_hash
        assert sorted(manifest.turn_ids) == ["s0-0", "s0-1", "s1-0", "s1-1"]
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line["step"] == line["version"] == line["update_attempts"] == 1
    assert (line["staleness_min"], line["staleness_max"]) == (0, 0)
    assert line["sequences"] == 2
    assert trainer.updater.expected_keys <= line.keys()
    assert (line["hint/vote_pos"], line["hint/vote_neg"], line["hint/accept_rate"]) == (6, 0, 1.0)
    assert line["hint/len_chars"] == len("answer in kelvin")
    assert line["hint/dropped_no_hint"] == line["hint/dropped_misaligned"] == 0
    assert line["hint/dropped_internal_error"] == line["guard/abandoned_turns"] == 0
    assert line["guard/engines_behind"] == 0
    assert line["teacher/latency"] == 0.0


async def test_a_guarded_version_is_not_trained_further_before_it_was_checked(folder, tmp_path):
    async with opened(tmp_path, folder, guarded=True) as (trainer, store, engine):
        await make_ready(store, samples(4))
        assert await trainer.step() is not None, "the start needs no check"
        assert await trainer.step() is None
        add_check(tmp_path, a_check(1))
        assert await trainer.step() is not None
        # What the guard orders when version 2 fails.
        order_rollback(tmp_path, 1)
        order_stop(tmp_path, StopOrder(reason="the guard withdrew version 2"))
        await trainer.run(asyncio.Event())
        ended = asyncio.Event()
        serving = asyncio.create_task(trainer.serve_on(ended, when_done=False))
        async with asyncio.timeout(30):
            while trainer.version != 3:
                await asyncio.sleep(0.01)
        ended.set()
        await serving
        assert trainer.manifest.restores == 1
        assert engine.version == "3"


async def test_the_trainers_forward_equals_the_engine_after_each_step(folder, tmp_path):
    sequences = random_sequences(VOCAB, [9, 30], seed=2)
    async with opened(tmp_path, folder, beta_kl=0.0) as (trainer, store, _):
        frozen = {"frozen": LocalEngine(str(folder))}
        await make_ready(store, samples(4))
        for _ in range(2):
            assert await trainer.step() is not None
            result = await trainer.calibrate(sequences, frozen)
            assert set(result.engines) == {"policy", "frozen"}
            assert result.noise < 1e-5
            assert trainer.updater.noise == result.noise
    assert json.loads((tmp_path / "calibration.json").read_text())["num_tokens"] == 8 + 29


async def test_advantages_are_stored_per_token(folder, tmp_path):
    batch = samples(2)
    async with opened(tmp_path, folder) as (trainer, store, _):
        await make_ready(store, batch)
        commits = []
        original = store.commit_step

        async def spy(**arguments):
            commits.append(arguments["results"])
            await original(**arguments)

        store.commit_step = spy  # type: ignore[method-assign]
        await trainer.step()
    for result in commits[0]:
        one = next(one for one in batch if one.turn_id == result.turn_id)
        assert len(result.advantages) == len(one.response_ids)
        assert result.advantage_abs_max == pytest.approx(np.abs(result.advantages).max())
        assert result.staleness == 0


async def test_stale_turns_expire_and_staleness_is_recorded(folder, tmp_path):
    async with opened(tmp_path, folder, max_staleness=1) as (trainer, store, _):
        await make_ready(store, samples(4))
        await trainer.step()
        report = await trainer.step()
        assert report is not None
        assert report.metrics["staleness_max"] == 1
        await make_ready(store, samples(2, first=10, version=0))
        assert await trainer.step() is None
        assert (await store.drops())[DropReason.STALE] == BATCH


async def test_a_batch_of_noise_is_dropped_and_changes_nothing(folder, tmp_path):
    async with opened(tmp_path, folder) as (trainer, store, engine):
        trainer.updater.noise = 1.0
        await make_ready(store, samples(4))
        for attempt in (1, 2):
            report = await trainer.step()
            assert report is not None
            assert report.skipped is DropReason.BELOW_NOISE
            assert report.version is None
            assert report.metrics["update_attempts"] == attempt
            assert report.metrics["guard/skipped_noise"] == attempt
        assert trainer.version == 0
        assert engine.version == "0"
        assert (await store.drops())[DropReason.BELOW_NOISE] == 2 * BATCH


async def test_a_broken_score_drops_its_turn_and_no_other(folder, tmp_path):
    batch = samples(2)
    async with opened(tmp_path, folder) as (trainer, store, _):
        await make_ready(store, batch)
        original = store.lease

        async def lease(**arguments):
            leased = await original(**arguments)
            broken = leased[1].teacher_logprobs.copy()
            broken[0] = np.nan
            return [leased[0], dataclasses.replace(leased[1], teacher_logprobs=broken), *leased[2:]]

        store.lease = lease  # type: ignore[method-assign]
        assert await trainer.step() is None
        assert await states(store) == {TurnState.READY: 3, TurnState.DROPPED: 1}
        assert (await store.drops())[DropReason.TEACHER_LOGPROBS_INVALID] == 1


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, None),
        ({"objective": {"reward_coef": 1.0}}, HistoryWindow(versions=32)),
        (
            {"objective": {"reward_coef": 1.0, "reward_baseline": "prompt"}},
            HistoryWindow(versions=32),
        ),
    ],
)
async def test_a_batch_brings_earlier_answers_where_the_objective_compares_them(
    folder, tmp_path, options, wanted
):
    async with opened(tmp_path, folder, **options) as (trainer, store, _):
        await make_ready(store, samples(2))
        original, asked = store.lease, []

        async def lease(**arguments):
            asked.append(arguments["history"])
            return await original(**arguments)

        store.lease = lease  # type: ignore[method-assign]
        assert await trainer.step() is not None
        assert asked == [wanted]


async def test_a_turn_without_a_usable_token_is_dropped_and_not_called_trained(folder, tmp_path):
    async with opened(tmp_path, folder) as (trainer, store, _):
        await make_ready(store, samples(2))
        original = trainer.updater.update

        def update(batch, step, **options):
            report = original(batch, step, **options)
            empty = np.full_like(report.advantages[2], np.nan)
            advantages = [*report.advantages[:2], empty, *report.advantages[3:]]
            return dataclasses.replace(report, advantages=advantages)

        trainer.updater.update = update  # type: ignore[method-assign]
        assert await trainer.step() is not None
        assert await states(store) == {TurnState.TRAINED: 3, TurnState.DROPPED: 1}
        assert len(trainer.manifest.turn_ids) == 3


async def test_an_engine_that_was_away_gets_the_newest_weights(folder, tmp_path):
    engine = LocalEngine(str(folder))
    async with opened(tmp_path, folder, engine) as (trainer, store, _):
        engine.fail["update_weights"] = 3
        await make_ready(store, samples(2))
        report = await trainer.step()
        assert report is not None
        assert report.metrics["guard/engines_behind"] == 1
        assert (trainer.version, engine.version) == (1, "0")
        await trainer._housekeeping()
        assert engine.version == "1"
        engine.version = "0"  # as after a restart from the start weights
        await asyncio.sleep(0.02)
        await trainer._housekeeping()
        assert engine.version == "1"


async def test_run_stops_at_max_steps_at_the_event_and_at_the_file(folder, tmp_path):
    reports = []
    async with opened(tmp_path, folder, max_steps=2) as (trainer, store, _):
        await make_ready(store, samples(6))
        await trainer.run(asyncio.Event(), reports.append)
        assert [report.version for report in reports] == [1, 2]
        assert await store.ready_count() == BATCH
    async with opened(tmp_path, folder) as (trainer, _, _):
        stop = asyncio.Event()
        task = asyncio.create_task(trainer.run(stop))
        await asyncio.sleep(0.05)
        stop.set()
        await task
    (tmp_path / "stop").touch()
    async with opened(tmp_path, folder) as (trainer, _, _):
        version = trainer.version
        await trainer.run(asyncio.Event())
        assert trainer.version == version


async def test_an_order_to_stop_brings_an_older_version_back(folder, tmp_path, caplog):
    engine = LocalEngine(str(folder))
    async with opened(tmp_path, folder, engine) as (trainer, store, _):
        await make_ready(store, samples(4))
        await trainer.run(asyncio.Event(), lambda report: stop_after(tmp_path, report, 2, 1))
        assert (trainer.version, engine.version) == (2, "1")
        assert "obedience fell" in caplog.text
    # The order stands: what comes up again serves what it says, and trains nothing.
    async with opened(tmp_path, folder, engine) as (trainer, store, _):
        await make_ready(store, samples(2, first=4))
        assert engine.version == "1", "not even before it looks at the order"
        await trainer.run(asyncio.Event())
        assert (trainer.version, engine.version) == (2, "1")


async def test_what_is_ordered_to_serve_is_calibrated_and_repaired_until_the_order_ends(
    folder, tmp_path
):
    engine = LocalEngine(str(folder))
    async with opened(tmp_path, folder, engine) as (trainer, store, _):
        await make_ready(store, samples(4))
        await trainer.run(asyncio.Event(), lambda report: stop_after(tmp_path, report, 2, 1))
    loads = engine.calls.count("update_weights")
    async with opened(tmp_path, folder, engine) as (trainer, _, _):
        assert engine.calls.count("update_weights") == loads + 1, "version 2 was never loaded"
        result = await trainer.calibrate(random_sequences(VOCAB, [9, 30], seed=2))
        assert result.noise < 1e-5
        stop = asyncio.Event()
        task = asyncio.create_task(
            train_and_serve(trainer, stop, stays=True, when_done=True),
        )
        await until(lambda: trainer.publisher.served == {"policy": 1})
        engine._load(str(folder))
        engine.version = "0"  # as after a restart from the start weights
        await until(lambda: engine.version == "1")
        (tmp_path / "stop").unlink()
        await until(lambda: engine.version == "2")
        stop.set()
        await task


async def test_after_the_last_step_an_engine_is_still_repaired(folder, tmp_path):
    engine = LocalEngine(str(folder))
    async with opened(tmp_path, folder, engine, max_steps=1) as (trainer, store, _):
        await make_ready(store, samples(2))
        stop = asyncio.Event()
        task = asyncio.create_task(
            train_and_serve(trainer, stop, stays=True, when_done=True),
        )
        await until(lambda: trainer.is_done and engine.version == "1")
        engine.version = "0"
        await until(lambda: engine.version == "1")
        order_stop(tmp_path, StopOrder(reason="obedience fell", serve_version=0))
        await until(lambda: engine.version == "0")
        stop.set()
        await task


async def until(is_so) -> None:
    async with asyncio.timeout(20):
        while not is_so():
            await asyncio.sleep(0.01)


async def test_weights_that_are_gone_cannot_be_brought_back(folder, tmp_path, caplog):
    engine = LocalEngine(str(folder))
    async with opened(tmp_path, folder, engine, keep_checkpoints=1) as (trainer, store, _):
        await make_ready(store, samples(6))
        await trainer.run(asyncio.Event(), lambda report: stop_after(tmp_path, report, 3, 1))
        assert engine.version == "3"
        assert "version 1 is not kept" in caplog.text


def stop_after(run, report, version, serve_version):
    if report.version == version:
        order_stop(run, StopOrder(reason="obedience fell", serve_version=serve_version))


async def test_leases_come_back_when_a_step_fails(folder, tmp_path):
    async with opened(tmp_path, folder) as (trainer, store, _):
        await make_ready(store, samples(2))

        def fail(*_, **__):
            raise RuntimeError("out of memory")

        trainer.updater.update = fail  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="out of memory"):
            await trainer.run(asyncio.Event())
        assert await states(store) == {TurnState.READY: BATCH}
        with pytest.raises(TrainerError, match="half-way"):
            await trainer.step()


async def test_old_weights_go_and_manifests_stay(folder, tmp_path):
    async with opened(tmp_path, folder, keep_checkpoints=2) as (trainer, store, _):
        await make_ready(store, samples(8))
        for _ in range(4):
            await trainer.step()
    root = tmp_path / "checkpoints"
    with_weights = sorted(path.parent.name for path in root.glob("*/model.safetensors"))
    assert with_weights == ["step_000003", "step_000004"]
    assert len(list(root.glob("*/manifest.json"))) == 5


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2, alpha=4)])
async def test_a_restart_in_the_middle_changes_nothing(folder, tmp_path, lora):
    """Two steps, a restart, two steps: bit-identical weights to four steps in one go."""
    for name, pieces in (("whole", [4]), ("halves", [2, 2])):
        run = tmp_path / name
        for index, steps in enumerate(pieces):
            async with opened(run, folder, lora=lora) as (trainer, store, engine):
                if index == 0:
                    await make_ready(store, samples(8))
                else:
                    assert engine.current == "2", "a restarted trainer brings the engine along"
                for _ in range(steps):
                    await trainer.step()
    one, other = final_weights(tmp_path / "whole", 4), final_weights(tmp_path / "halves", 4)
    assert all(torch.equal(one[name], other[name]) for name in one)


async def test_another_start_model_cannot_take_over_a_run(folder, tmp_path):
    async with opened(tmp_path / "run", folder):
        pass
    other = save_model(tmp_path / "other", seed=5)
    with pytest.raises(CheckpointError, match="started from"):
        async with opened(tmp_path / "run", other):
            pass


async def test_a_step_is_a_span_in_the_trace_of_each_of_its_turns(folder, tmp_path):
    with kept_spans() as kept:
        async with opened(tmp_path, folder) as (trainer, store, _):
            await make_ready(store, samples(2))
            assert await trainer.step() is not None
        [step] = [span for span in kept.spans if span.name == "step" and span.parent is None]
        assert (said(step)["opd.version"], len(step.links)) == (1, BATCH)
        parts = [span.name for span in kept.spans if span.parent == step.context]
        assert parts == ["lease", "update", "checkpoint", "commit", "publish"]
        assert [span.name for span in kept.of_turn("s0-1")] == ["step"]
