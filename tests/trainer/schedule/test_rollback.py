import asyncio

import pytest
import torch

from records.database import fail_points
from records.names import TurnState
from rollout_bridge.stop_order import read_stop
from tests.trainer.local_engine import LocalEngine
from tests.trainer.step.test_loop import (
    BATCH,
    final_weights,
    opened,
    samples,
    save_model,
    stop_after,
)
from tests.trainer.tiny import make_ready, states
from trainer.checkpoints.manifest import Manifest, withdrawn
from trainer.config import LoraConfig
from trainer.errors import CheckpointError
from trainer.schedule.rollback_order import order_rollback, read_rollback


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


async def steps(trainer, store, count: int, first: int = 0) -> None:
    await make_ready(store, samples(2 * count, first=first))
    for _ in range(count):
        assert await trainer.step() is not None


def same(run, one: int, other: int) -> bool:
    left, right = final_weights(run, one), final_weights(run, other)
    return all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2, alpha=4)])
async def test_a_run_at_work_goes_back_and_trains_on_as_from_the_older_version(
    folder, tmp_path, lora
):
    back, straight = tmp_path / "back", tmp_path / "straight"
    async with opened(back, folder, lora=lora) as (trainer, store, engine):
        await steps(trainer, store, 2)
        order_rollback(back, 1)
        await trainer.run(stop_when(back))
        assert (trainer.version, engine.version if lora is None else "3") == (3, "3")
        assert set(trainer.publisher.served.values()) == {3}
        assert same(back, 1, 3)
        assert not same(back, 2, 3)
        # What version 2 trained stays trained; what was measured of it counts no more.
        assert await store.versions_given_up() == {2}
        assert await states(store) == {TurnState.TRAINED: 2 * BATCH}
        await steps(trainer, store, 1, first=4)
    async with opened(straight, folder, lora=lora) as (trainer, store, _):
        await steps(trainer, store, 1)
        await steps(trainer, store, 1, first=4)
    theirs = final_weights(straight, 2)
    for name, tensor in final_weights(back, 4).items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-6, rtol=1e-5)
    links = [Manifest.read(back / "checkpoints" / f"step_{n:06d}") for n in range(5)]
    assert [link.restores for link in links] == [None, None, None, 1, None]
    assert [link.step for link in links] == [0, 1, 2, 2, 3]
    assert withdrawn(links) == {2}


_watching = set()


def stop_when(run) -> asyncio.Event:
    """Set once the order has been followed."""
    stop = asyncio.Event()

    async def watch() -> None:
        while read_rollback(run) is not None:
            await asyncio.sleep(0.01)
        stop.set()

    task = asyncio.ensure_future(watch())
    _watching.add(task)
    task.add_done_callback(_watching.discard)
    return stop


@pytest.mark.parametrize("point", ["checkpoint.unnamed", "checkpoint.named"])
async def test_a_rollback_that_was_cut_short_is_done_once_at_the_next_start(
    folder, tmp_path, monkeypatch, point
):
    engine = LocalEngine(str(folder))
    async with opened(tmp_path, folder, engine) as (trainer, store, _):
        await steps(trainer, store, 2)
        order_rollback(tmp_path, 1)

        def die(name: str) -> None:
            if name == point:
                raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(fail_points, "reach", die)
            with pytest.raises(KeyboardInterrupt):
                trainer.checkpoints.roll_back(1, parent=trainer.manifest, new_version=3)
    async with opened(tmp_path, folder, engine) as (trainer, store, _):
        assert (trainer.version, engine.version) == (3, "3")
        assert trainer.manifest.restores == 1
        assert await store.versions_given_up() == {2}
        assert read_rollback(tmp_path) is None
        assert await states(store) == {TurnState.TRAINED: 2 * BATCH}
        latest = await store.latest_version()
        assert latest is not None
        assert latest.version == 3
    assert same(tmp_path, 1, 3)


async def test_after_a_stop_the_restored_version_serves_and_the_stop_stays(folder, tmp_path):
    engine = LocalEngine(str(folder))
    async with opened(tmp_path, folder, engine) as (trainer, store, _):
        await make_ready(store, samples(6))
        await trainer.run(asyncio.Event(), lambda report: stop_after(tmp_path, report, 3, 2))
        assert engine.version == "2"
    order_rollback(tmp_path, 1)
    async with opened(tmp_path, folder, engine) as (trainer, store, _):
        assert (trainer.version, engine.version) == (4, "4")
        order = read_stop(tmp_path)
        assert order is not None
        assert (order.reason, order.serve_version) == ("obedience fell", None)


async def test_a_version_that_is_gone_is_said_and_the_order_is_taken_away(folder, tmp_path, caplog):
    async with opened(tmp_path, folder, keep_checkpoints=1) as (trainer, store, _):
        await steps(trainer, store, 2)
        order_rollback(tmp_path, 1)
        await trainer.run(stop_when(tmp_path))
        assert trainer.version == 2
    assert "version 1 cannot be restored" in caplog.text
    assert "choose one of: 2" in caplog.text


def test_an_order_that_names_no_version_is_an_error(tmp_path):
    (tmp_path / "rollback").write_text("yesterday")
    with pytest.raises(CheckpointError, match="'yesterday' is not a version"):
        read_rollback(tmp_path)
