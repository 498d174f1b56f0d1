"""Killing the trainer: at every point of a step, and for real."""

import asyncio
import random
import sys
from pathlib import Path

import pytest
import torch

from records.names import TurnState
from records.store import Store
from tests.records.new_store import new_store
from tests.trainer.local_engine import LocalEngine
from tests.trainer.step.test_loop import BATCH, final_weights, opened, samples, settings
from tests.trainer.tiny import make_ready, states
from trainer.checkpoints import checkpoint as checkpoint_module
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.step.loop import EmbeddedTrainer

STEPS = 3


class Killed(BaseException):
    """Nothing catches it, as nothing catches SIGKILL."""


def kill(*_args, **_kwargs):
    raise Killed


async def kill_async(*_args, **_kwargs):
    raise Killed


def kill_after(function):
    async def wrapper(*args, **kwargs):
        await function(*args, **kwargs)
        raise Killed

    return wrapper


def arm(point: str, trainer: EmbeddedTrainer, engine: LocalEngine, monkeypatch) -> None:
    """Make the next step die at `point`."""
    if point == "computing":
        monkeypatch.setattr(trainer.updater, "update", kill)
    elif point == "writing":
        monkeypatch.setattr(checkpoint_module, "_rng_state", kill)
    elif point == "before rename":
        monkeypatch.setattr(Path, "rename", kill)
    elif point == "after rename":
        monkeypatch.setattr(trainer.store, "commit_step", kill_async)
    elif point == "after commit":
        original = trainer.store.commit_step
        monkeypatch.setattr(trainer.store, "commit_step", kill_after(original))
    elif point == "publishing":
        monkeypatch.setattr(engine, "update_weights", kill_async)
    elif point == "pruning":
        monkeypatch.setattr(trainer.checkpoints, "prune", kill)


POINTS = [
    "computing",
    "writing",
    "before rename",
    "after rename",
    "after commit",
    "publishing",
    "pruning",
]


async def begun(
    run: Path, folder: Path, engine: LocalEngine, **options
) -> tuple[EmbeddedTrainer, Store]:
    """A trainer whose test decides how it ends."""
    store = await Store.open(new_store(run / "records.db"))
    trainer = await EmbeddedTrainer.open(
        store=store,
        config=settings(**options),
        run_folder=run,
        model=str(folder),
        engines={"policy": engine},
    )
    return trainer, store


async def died(trainer: EmbeddedTrainer, store: Store) -> None:
    """As after a kill: no lease is given back, nothing is closed properly by the trainer."""
    trainer._metrics.close()
    trainer._thread.shutdown()
    await store.close()


@pytest.fixture(scope="module")
def undisturbed(folder, tmp_path_factory):
    """The weights of a run that nobody killed."""
    run = tmp_path_factory.mktemp("undisturbed")

    async def train():
        async with opened(run, folder) as (trainer, store, _):
            await make_ready(store, samples(STEPS * BATCH // 2))
            for _ in range(STEPS):
                await trainer.step()

    asyncio.run(train())
    return final_weights(run, STEPS)


async def check_every_turn_once(run, folder) -> list[int]:
    """The chain and the store agree, and every turn was trained once. Returns the versions."""
    chain = Checkpoints(run / "checkpoints", str(folder), seed=0).open()
    trained = [turn for link in chain for turn in link.turn_ids]
    assert len(trained) == len(set(trained)) == STEPS * BATCH
    async with await Store.open(new_store(run / "records.db")) as store:
        assert await states(store) == {TurnState.TRAINED: STEPS * BATCH}
        latest = await store.latest_version()
        assert latest is not None
        assert latest.version == chain[-1].version
    return [link.version for link in chain]


@pytest.mark.parametrize("point", POINTS)
async def test_a_kill_at_any_point_loses_nothing_and_repeats_nothing(
    point, folder, tmp_path, undisturbed, monkeypatch
):
    engine = LocalEngine(str(folder))
    trainer, store = await begun(tmp_path, folder, engine)
    await make_ready(store, samples(STEPS * BATCH // 2))
    await trainer.step()
    with monkeypatch.context() as patches:
        arm(point, trainer, engine, patches)
        with pytest.raises(Killed):
            await trainer.step()
        await died(trainer, store)
    async with opened(tmp_path, folder, engine) as (trainer, store, _):
        assert (await states(store)).get(TurnState.LEASED, 0) == 0
        assert engine.version == str(trainer.version)
        while await trainer.step() is not None:
            pass
        assert engine.version == str(trainer.version)
        assert not engine.paused
    versions = await check_every_turn_once(tmp_path, folder)
    weights = final_weights(tmp_path, versions[-1])
    assert all(torch.equal(weights[name], undisturbed[name]) for name in weights)


@pytest.mark.parametrize("point", POINTS)
async def test_a_kill_between_states_of_the_optimiser_goes_back_to_the_newest_that_has_one(
    point, folder, tmp_path, undisturbed, monkeypatch
):
    """Of three steps only the last has it: a kill in the second one costs both, and no turn."""
    engine = LocalEngine(str(folder))
    every = {"optimizer_every": STEPS}
    trainer, store = await begun(tmp_path, folder, engine, **every)
    await make_ready(store, samples(STEPS * BATCH // 2))
    await trainer.step()
    written = {path.name for path in (tmp_path / "checkpoints" / "step_000001").iterdir()}
    assert "model.safetensors" in written
    assert "optimizer.pt" not in written
    with monkeypatch.context() as patches:
        if point == "writing":
            patches.setattr(Checkpoints, "_save_weights", kill)
        else:
            arm(point, trainer, engine, patches)
        with pytest.raises(Killed):
            await trainer.step()
        await died(trainer, store)
    async with opened(tmp_path, folder, engine, **every) as (trainer, store, _):
        assert trainer.version == 0
        assert engine.version == "0", "later versions are abandoned"
        assert await states(store) == {TurnState.READY: STEPS * BATCH}
        while await trainer.step() is not None:
            pass
    versions = await check_every_turn_once(tmp_path, folder)
    assert versions[1] > 1, "numbers are never used again"
    weights = final_weights(tmp_path, versions[-1])
    assert all(torch.equal(weights[name], undisturbed[name]) for name in weights)


async def test_the_newest_state_of_the_optimiser_is_kept_and_the_last_step_has_one(
    folder, tmp_path
):
    options = {"optimizer_every": 3, "keep_checkpoints": 1, "max_steps": 5}
    async with opened(tmp_path, folder, **options) as (trainer, store, _):
        await make_ready(store, samples(5 * BATCH // 2))
        kept = []
        for _ in range(5):
            await trainer.step()
            found = (tmp_path / "checkpoints").glob("step_*/optimizer.pt")
            kept.append([int(path.parent.name[5:]) for path in found])
        assert kept == [[], [], [3], [3], [5]]
    async with opened(tmp_path, folder, **options) as (trainer, _, _):
        assert trainer.version == 5


@pytest.mark.parametrize("point", POINTS)
async def test_a_kill_at_any_point_repeats_no_time_of_a_turn(point, folder, tmp_path, monkeypatch):
    """Every turn trains twice, each time in exactly one surviving version."""
    again = {"replay_times": 2}
    engine = LocalEngine(str(folder))
    trainer, store = await begun(tmp_path, folder, engine, **again)
    await make_ready(store, samples(BATCH))
    for _ in range(2):
        await trainer.step()
    with monkeypatch.context() as patches:
        arm(point, trainer, engine, patches)
        with pytest.raises(Killed):
            await trainer.step()
        await died(trainer, store)
    async with opened(tmp_path, folder, engine, **again) as (trainer, store, _):
        while await trainer.step() is not None:
            pass
        assert await states(store) == {TurnState.TRAINED: 2 * BATCH}
        assert await store.ready_count(repeats=True) == 0
    chain = Checkpoints(tmp_path / "checkpoints", str(folder), seed=0).open()
    trained = [one for link in chain for one in link.time_of.items()]
    turns = {turn for turn, _ in trained}
    assert len(turns) == 2 * BATCH
    assert sorted(trained) == sorted((turn, time) for turn in turns for time in (1, 2))


async def test_a_lost_checkpoint_returns_its_turns_and_its_number_is_not_used_again(
    folder, tmp_path, undisturbed
):
    async with opened(tmp_path, folder) as (trainer, store, _):
        await make_ready(store, samples(STEPS * BATCH // 2))
        await trainer.step()
        await trainer.step()
    (tmp_path / "checkpoints" / "step_000002" / "model.safetensors").unlink()
    engine = LocalEngine(str(folder), version="2")
    async with opened(tmp_path, folder, engine) as (trainer, store, _):
        assert trainer.version == 1
        assert engine.version == "1", "what the engine served is gone"
        assert await store.ready_count() == 2 * BATCH
        while await trainer.step() is not None:
            pass
    assert await check_every_turn_once(tmp_path, folder) == [0, 1, 3, 4]
    weights = final_weights(tmp_path, 4)
    assert all(torch.equal(weights[name], undisturbed[name]) for name in weights)


async def test_turns_of_a_lost_checkpoint_are_aged_by_surviving_steps_and_counted(folder, tmp_path):
    async with opened(tmp_path, folder) as (trainer, store, _):
        await make_ready(store, samples(BATCH))
        await trainer.step()
        await trainer.step()
    (tmp_path / "checkpoints" / "step_000002" / "model.safetensors").unlink()
    async with opened(tmp_path, folder, max_staleness=2) as (trainer, store, _):
        # The turns of version 0 that the lost step had trained come first. The difference of
        # version numbers would be 4 - 1 for the last batch, and it would expire.
        await make_ready(store, samples(BATCH // 2, first=BATCH, version=2))
        await make_ready(store, samples(BATCH // 2, first=2 * BATCH, version=1))
        reports = [await trainer.step() for _ in range(3)]
        assert await store.drops() == {}
    metrics = [report.metrics for report in reports if report is not None]
    assert [report["version"] for report in metrics] == [3, 4, 5]
    assert [report["staleness_max"] for report in metrics] == [1, 1, 2]
    assert [report["guard/abandoned_turns"] for report in metrics] == [0, BATCH, 0]


@pytest.mark.long
async def test_kill_9_again_and_again(folder, tmp_path, undisturbed):
    async with await Store.open(new_store(tmp_path / "records.db")) as store:
        await make_ready(store, samples(STEPS * BATCH // 2))
    generator = random.Random(4)
    command = [sys.executable, "-m", "tests.trainer.training_process"]
    command += [str(tmp_path), str(folder), str(STEPS)]
    for attempt in range(3):
        process = await asyncio.create_subprocess_exec(
            *command, cwd=Path(__file__).parents[3], stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        if attempt < 2:
            # The line says that the trainer has opened; its steps follow at once.
            assert await process.stdout.readline() == b"open\n"
            await asyncio.sleep(generator.uniform(0.0, 0.08))
            process.kill()
        code = await asyncio.wait_for(process.wait(), 60)
    assert code == 0
    versions = await check_every_turn_once(tmp_path, folder)
    weights = final_weights(tmp_path, versions[-1])
    assert all(torch.equal(weights[name], undisturbed[name]) for name in weights)
