import asyncio
import json
import logging

import numpy as np
import pytest
import torch

from rollout_bridge.engine.hold_file import HOLD_FILE
from rollout_bridge.engine.served import STAGED_FILE, ServedFile
from rollout_bridge.guard.checks import add_check
from rollout_bridge.stop_order import STOP_FILE, StopOrder, order_stop
from tests.rollout_bridge.guard.test_checks import a_check
from tests.trainer.checkpoints.test_checkpoint import save_as_earlier
from tests.trainer.local_engine import LocalEngine
from tests.trainer.step.test_loop import opened, samples, stop_after
from tests.trainer.tiny import VOCAB, load, make_ready, random_sequences, save_model
from trainer.calibration.calibrate import own_logprobs
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.checkpoints.manifest import Manifest
from trainer.config import LoraConfig
from trainer.errors import StartupError
from trainer.model.lora import add_adapters, save_adapter
from trainer.publishing.adapter_publish import AdapterPublisher, adapter_name
from trainer.publishing.publish import PublishedWeights, Publisher
from trainer.schedule.rollback_order import order_rollback
from trainer.step import versions

LORA = LoraConfig(rank=2, alpha=4)


@pytest.fixture(scope="module")
def adapter(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("adapter")
    save_adapter(add_adapters(load(folder).model, LORA, 0), path, str(folder))
    return str(path)


def weights(version: int, path: str) -> PublishedWeights:
    digest = f"{version:012x}"
    return PublishedWeights(version=version, path=path, adapter=f"opd-v{version:06d}-{digest}")


def made(folder, run, *engines: LocalEngine) -> AdapterPublisher:
    file = ServedFile(run)
    for engine in engines:
        engine.served = file
    named = {f"engine {number}": engine for number, engine in enumerate(engines)}
    staging = ServedFile(run, STAGED_FILE)
    return AdapterPublisher(named, file, staging, str(folder), attempts=2, backoff_s=0.001)


async def settled(publisher: Publisher | AdapterPublisher) -> None:
    """What goes on in the background has ended."""
    assert isinstance(publisher, AdapterPublisher)
    await asyncio.gather(*publisher._unloading.values())


async def test_a_version_is_loaded_everywhere_before_requests_name_it(folder, adapter, tmp_path):
    one, other = LocalEngine(str(folder)), LocalEngine(str(folder))
    publisher = made(folder, tmp_path, one, other)
    assert await publisher.publish(weights(1, adapter)) == []
    assert (one.current, other.current) == ("1", "1")
    other.fail["load_adapter"] = 2
    assert await publisher.publish(weights(2, adapter)) == ["engine 1"]
    assert (one.current, other.current) == ("1", "1"), "the other one lacks version 2"
    assert publisher.served == {"engine 0": 1, "engine 1": 1}
    assert await publisher.repair(weights(2, adapter)) == []
    assert (one.current, other.current) == ("2", "2")
    assert not {"pause", "update_weights"} & {*one.calls, *other.calls}


async def test_the_one_before_stays_loaded_and_older_ones_go(folder, adapter, tmp_path):
    engine = LocalEngine(str(folder))
    engine.loaded["somebody-elses"] = adapter
    publisher = made(folder, tmp_path, engine)
    for version in (1, 2, 3):
        await publisher.publish(weights(version, adapter))
        await settled(publisher)
    kept = [weights(version, adapter).adapter for version in (2, 3)]
    assert [*engine.loaded] == ["somebody-elses", *kept]


async def test_what_an_earlier_trainer_left_is_unloaded(folder, adapter, tmp_path):
    engine = LocalEngine(str(folder))
    await made(folder, tmp_path, engine).publish(weights(1, adapter))
    again = made(folder, tmp_path, engine)
    await again.publish(weights(2, adapter))
    await settled(again)
    assert [*engine.loaded] == [weights(2, adapter).adapter]


async def test_version_0_is_the_base(folder, adapter, tmp_path):
    engine = LocalEngine(str(folder))
    publisher = made(folder, tmp_path, engine)
    await publisher.publish(weights(1, adapter))
    await publisher.publish(PublishedWeights(version=0, path=str(folder)))
    assert engine.current == "0"
    assert json.loads((tmp_path / "served.json").read_text())["adapter"] is None


async def test_an_engine_with_merged_weights_gets_its_base_back(folder, adapter, tmp_path):
    engine = LocalEngine(str(save_model(tmp_path / "merged", seed=4)), version="5")
    await engine.pause("retract")
    await made(folder, tmp_path, engine).publish(weights(6, adapter))
    assert (engine.version, engine.path, engine.current) == ("0", str(folder), "6")
    assert not engine.paused


async def test_an_engine_that_was_left_paused_goes_on(folder, adapter, tmp_path):
    engine = LocalEngine(str(folder))
    await engine.pause("retract")
    publisher = made(folder, tmp_path, engine)
    await publisher.repair(PublishedWeights(version=0, path=str(folder)))
    assert not engine.paused
    await publisher.repair(PublishedWeights(version=0, path=str(folder)))
    assert engine.calls.count("resume") == 1


async def test_a_lost_file_is_written_again(folder, adapter, tmp_path):
    engine = LocalEngine(str(folder))
    publisher = made(folder, tmp_path, engine)
    await publisher.publish(weights(1, adapter))
    for content in (None, "{", '{"version": 0, "adapter": null, "folder": null}'):
        (tmp_path / "served.json").unlink()
        if content is not None:
            (tmp_path / "served.json").write_text(content)
        await publisher.repair(weights(1, adapter))
        assert engine.current == "1"


async def test_steps_are_published_as_adapters_and_computed_alike(folder, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    sequences = random_sequences(VOCAB, [9, 30], seed=2)
    async with opened(tmp_path, folder, lora=LORA) as (trainer, store, engine):
        assert "adapters are published as they are" in caplog.text
        assert engine.loaded == {}, "the probe is gone"
        await make_ready(store, samples(4))
        for version in (1, 2):
            report = await trainer.step()
            assert report is not None
            assert report.metrics["guard/merged_for_engines"] == 0
            assert engine.current == str(version)
            result = await trainer.calibrate(sequences, {"frozen": LocalEngine(str(folder))})
            assert result.noise < 1e-5
        await settled(trainer.publisher)
        manifest = Manifest.read(tmp_path / "checkpoints" / "step_000002")
        assert [*engine.loaded][-1] == adapter_name(manifest)
        assert (engine.version, len(engine.loaded)) == ("0", 2)
    assert "update_weights" not in engine.calls
    assert not (tmp_path / "merged").exists()


async def test_a_restarted_engine_gets_the_served_adapter_again(folder, tmp_path):
    async with opened(tmp_path, folder, lora=LORA) as (trainer, store, engine):
        await make_ready(store, samples(2))
        await trainer.step()
        engine.restart()
        await asyncio.sleep(0.02)
        await trainer._housekeeping()
        assert engine.current == "1"
        assert len(engine.loaded) == 1


async def test_an_engine_without_adapters_gets_merged_weights_and_it_is_said(
    folder, tmp_path, caplog
):
    engine = LocalEngine(str(folder))
    engine.refuses_adapters = "LoRA is not enabled.\nStart the server with --enable-lora"
    async with opened(tmp_path, folder, engine, lora=LORA) as (trainer, store, _):
        (said,) = [one.message for one in caplog.records if "merged" in one.message]
        assert said == (
            "adapters are merged for the engines at each step: engine policy says: LoRA is not "
            "enabled. Start the server with --enable-lora"
        )
        await make_ready(store, samples(2))
        report = await trainer.step()
        assert report is not None
        assert report.metrics["guard/merged_for_engines"] == 1
        assert (engine.version, engine.current) == ("1", "1")
        result = await trainer.calibrate(random_sequences(VOCAB, [9, 30], seed=2))
        assert result.noise < 1e-5
        assert [one.name for one in (tmp_path / "merged").iterdir()] == ["step_000001"]
    with pytest.raises(StartupError, match=r"trainer.publish: adapters cannot be served next to"):
        async with opened(tmp_path, folder, engine, lora=LORA, publish="adapter"):
            pass


async def test_from_merged_to_adapters_and_back(folder, tmp_path):
    engine = LocalEngine(str(folder))
    async with opened(tmp_path, folder, engine, lora=LORA, publish="merged") as (trainer, store, _):
        await make_ready(store, samples(2))
        await trainer.step()
        assert (engine.version, engine.current) == ("1", "1")
    async with opened(tmp_path, folder, engine, lora=LORA) as (trainer, store, _):
        assert (engine.version, engine.current) == ("0", "1")
    async with opened(tmp_path, folder, engine, lora=LORA, publish="merged") as (trainer, store, _):
        assert (engine.version, engine.current) == ("1", "1")
        assert not (tmp_path / "served.json").exists()


async def test_an_order_brings_an_older_adapter_back(folder, tmp_path):
    engine = LocalEngine(str(folder))
    async with opened(tmp_path, folder, engine, lora=LORA) as (trainer, store, _):
        await make_ready(store, samples(4))
        await trainer.run(asyncio.Event(), lambda report: stop_after(tmp_path, report, 2, 1))
        assert (trainer.version, engine.current) == (2, "1")
    async with opened(tmp_path, folder, engine, lora=LORA) as (trainer, _, _):
        assert engine.current == "1"
        result = await trainer.calibrate(random_sequences(VOCAB, [9, 30], seed=2))
        assert result.noise < 1e-5


@pytest.mark.parametrize("publish", ["auto", "merged"])
async def test_a_checkpoint_of_an_earlier_program_is_served(folder, tmp_path, monkeypatch, publish):
    with monkeypatch.context() as earlier:
        earlier.setattr(Checkpoints, "_save_weights", save_as_earlier)
        async with opened(tmp_path, folder, lora=LORA, publish="merged") as (trainer, store, _):
            await make_ready(store, samples(2))
            await trainer.step()
    ids = random_sequences(VOCAB, [20], seed=1)[0]
    engine = LocalEngine(str(folder))
    async with opened(tmp_path, folder, engine, lora=LORA, publish=publish) as (trainer, store, _):
        assert engine.current == "1"
        policy = trainer.updater.policy
        expected = own_logprobs(policy, torch.device("cpu"))(ids)
        np.testing.assert_allclose(await engine.score(ids, 1), expected, atol=1e-5)
        await make_ready(store, samples(2, first=9))
        await trainer.step()
        assert engine.current == "2"


def staged(run) -> str | None:
    found = ServedFile(run, STAGED_FILE).current()
    return None if found is None else found.label


async def test_a_guarded_step_serves_nobody_before_it_passed(folder, tmp_path):
    async with opened(tmp_path, folder, lora=LORA, guarded=True) as (trainer, store, engine):
        await make_ready(store, samples(4))
        report = await trainer.step()
        assert report is not None
        assert report.metrics["guard/engines_behind"] == 0
        assert (trainer.version, engine.current, staged(tmp_path)) == (1, "0", "1")
        assert len(engine.loaded) == 1
        # The checked version may be lost by its engine, too.
        engine.restart()
        await asyncio.sleep(0.02)
        await trainer._housekeeping()
        assert len(engine.loaded) == 1
        assert await trainer.step() is None, "no step from what has not passed"
        add_check(tmp_path, a_check(1))
        assert await trainer.step() is not None
        await settled(trainer.publisher)
        assert (trainer.version, engine.current, staged(tmp_path)) == (2, "1", "2")
    # It may be killed at any time: the next one stages it again, or publishes what has passed.
    async with opened(tmp_path, folder, engine, lora=LORA, guarded=True) as (trainer, _, _):
        assert (trainer.version, engine.current, staged(tmp_path)) == (2, "1", "2")
    add_check(tmp_path, a_check(2))
    async with opened(tmp_path, folder, engine, lora=LORA, guarded=True) as (trainer, _, _):
        await settled(trainer.publisher)
        assert (engine.current, staged(tmp_path)) == ("2", None)
        assert len(engine.loaded) <= 2


async def test_a_version_that_failed_is_unloaded_and_never_serves(folder, tmp_path, caplog):
    caplog.set_level(logging.ERROR)
    ended = asyncio.Event()
    async with opened(tmp_path, folder, lora=LORA, guarded=True) as (trainer, store, engine):
        await make_ready(store, samples(4))
        await trainer.step()
        add_check(tmp_path, a_check(1))
        await trainer.step()
        # What the guard orders when version 2 fails.
        order_stop(tmp_path, StopOrder(reason="the guard did not publish 2", serve_version=1))
        order_rollback(tmp_path, 1)
        add_check(tmp_path, a_check(2).model_copy(update={"breaches": ["bad"], "staged": True}))
        await trainer.run(ended)
        assert engine.current == "1"
        assert "the guard did not publish 2" in caplog.text
        serving = asyncio.create_task(trainer.serve_on(ended, when_done=False))
        async with asyncio.timeout(60):
            while engine.current == "1":
                await asyncio.sleep(0.01)
        ended.set()
        await serving
        await settled(trainer.publisher)
        assert (trainer.version, engine.current, staged(tmp_path)) == (3, "3", None)
        failed = adapter_name(Manifest.read(tmp_path / "checkpoints" / "step_000002"))
        assert failed not in engine.loaded


async def test_a_failed_version_is_staged_again_when_training_resumes(folder, tmp_path):
    async with opened(tmp_path, folder, lora=LORA, guarded=True) as (trainer, store, engine):
        await make_ready(store, samples(2))
        await trainer.step()
        # Only the start is left to go back to: nothing is restored.
        order_stop(tmp_path, StopOrder(reason="bad", serve_version=0))
        add_check(tmp_path, a_check(1).model_copy(update={"breaches": ["bad"], "staged": True}))
        await trainer.run(asyncio.Event())
        assert engine.current == "0"
        (tmp_path / STOP_FILE).unlink()
        assert await trainer.step() is None
        assert (engine.current, staged(tmp_path)) == ("0", "1")
        add_check(tmp_path, a_check(1))
        assert await trainer.step() is None
        assert (engine.current, staged(tmp_path)) == ("1", None)


async def test_the_last_version_is_published_if_it_passes_in_time(
    folder, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(versions, "LAST_CHECK_S", 0.0)
    options = {"lora": LORA, "guarded": True, "max_steps": 1}
    async with opened(tmp_path, folder, **options) as (trainer, store, engine):
        await make_ready(store, samples(2))
        await trainer.run(asyncio.Event())
        assert engine.current == "0"
        assert "version 1 is not published: it was not checked within 0 s" in caplog.text
        monkeypatch.setattr(versions, "LAST_CHECK_S", 60.0)
        ending = asyncio.create_task(trainer.run(asyncio.Event()))
        await asyncio.sleep(0.1)
        assert not ending.done()
        add_check(tmp_path, a_check(1))
        await ending
        assert engine.current == "1"


async def test_merged_weights_serve_while_they_are_checked(folder, tmp_path):
    options = {"lora": LORA, "guarded": True, "publish": "merged"}
    async with opened(tmp_path, folder, **options) as (trainer, store, engine):
        await make_ready(store, samples(2))
        await trainer.step()
        assert (engine.current, staged(tmp_path)) == ("1", None)


async def test_generation_is_held_until_a_staged_version_serves(folder, tmp_path):
    options = {"lora": LORA, "guarded": True, "schedule": "sync"}
    async with opened(tmp_path, folder, **options) as (trainer, store, engine):
        await make_ready(store, samples(2))
        await trainer.step()
        await trainer.step()
        assert (tmp_path / HOLD_FILE).exists()
        add_check(tmp_path, a_check(1))
        await trainer.step()
        assert engine.current == "1"
        assert not (tmp_path / HOLD_FILE).exists()
