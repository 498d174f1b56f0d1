import asyncio

import pytest

from tests.trainer.local_engine import LocalEngine
from tests.trainer.tiny import save_model
from trainer.publishing.publish import PublishedWeights, Publisher


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_model(tmp_path_factory.mktemp("model")))


def full(path: str, version: int) -> PublishedWeights:
    return PublishedWeights(version=version, path=path)


def publisher(**engines: LocalEngine) -> Publisher:
    return Publisher(engines, attempts=3, backoff_s=0.001)


async def test_engines_are_paused_loaded_and_resumed(folder):
    engine = LocalEngine(folder)
    assert await publisher(a=engine).publish(full(folder, 3)) == []
    assert engine.calls == ["pause", "flush_cache", "update_weights", "resume"]
    assert (engine.version, engine.paused) == ("3", False)


async def test_weights_change_only_once_the_cache_is_empty(folder, monkeypatch):
    monkeypatch.setattr("trainer.publishing.exchange._FLUSH_WAIT_S", 0.001)
    engine = LocalEngine(folder)
    engine.compiling = 2
    assert await publisher(a=engine).publish(full(folder, 3)) == []
    tried = ["pause", "flush_cache", "resume"]
    assert engine.calls == [*tried, *tried, "pause", "flush_cache", "update_weights", "resume"]


async def test_an_engine_that_never_empties_its_cache_keeps_its_weights(folder, monkeypatch):
    monkeypatch.setattr("trainer.publishing.exchange._FLUSH_WAIT_S", 0.001)
    engine = LocalEngine(folder)
    engine.compiling = 10**6
    assert await publisher(a=engine).publish(full(folder, 3)) == ["a"]
    assert "update_weights" not in engine.calls
    assert (engine.version, engine.paused) == ("0", False)


@pytest.mark.parametrize("mode", ["retract", "abort", "in_place"])
async def test_an_engine_is_paused_as_configured_once_its_cache_is_known(folder, mode):
    engine = LocalEngine(folder)
    target = Publisher({"a": engine}, mode=mode)
    assert await target.publish(full(folder, 1)) == await target.publish(full(folder, 2)) == []
    first = "abort" if mode == "abort" else "retract"
    assert engine.modes == [first, mode]
    engine.fail["model_info"] = 1
    assert await target.repair(full(folder, 3)) == ["a"]
    assert await target.repair(full(folder, 3)) == []
    assert engine.modes == [first, mode, first]


@pytest.mark.parametrize("step", ["pause", "update_weights", "resume"])
async def test_a_failure_is_tried_again_and_the_engine_always_resumes(folder, step):
    engine = LocalEngine(folder)
    engine.fail[step] = 2
    target = publisher(a=engine)
    assert await target.publish(full(folder, 3)) == []
    assert (engine.version, engine.paused) == ("3", False)
    assert target.served == {"a": 3}
    assert engine.calls.count("resume") == 3


async def test_an_engine_that_stays_away_keeps_no_other_from_the_new_weights(folder):
    good, bad = LocalEngine(folder), LocalEngine(folder)
    bad.fail["update_weights"] = 99
    target = publisher(good=good, bad=bad)
    assert await target.publish(full(folder, 1)) == ["bad"]
    assert (good.version, bad.version, bad.paused) == ("1", "0", False)
    assert target.served == {"good": 1, "bad": None}
    bad.fail.clear()
    assert await target.repair(full(folder, 1)) == []
    assert (bad.version, good.calls.count("update_weights")) == ("1", 1)


async def test_an_engine_that_cannot_be_asked_is_reported(folder):
    engine = LocalEngine(folder)
    engine.fail["model_info"] = 1
    target = publisher(a=engine)
    assert await target.repair(full(folder, 0)) == ["a"]
    assert await target.repair(full(folder, 0)) == []
    assert engine.calls.count("update_weights") == 0


async def test_an_engine_that_has_the_weights_but_never_resumed_is_let_go_on(folder):
    engine = LocalEngine(folder)
    engine.fail["resume"] = 4
    target = publisher(a=engine)
    assert await target.publish(full(folder, 1)) == ["a"]
    assert (engine.version, engine.paused) == ("1", True)
    assert await target.repair(full(folder, 1)) == ["a"]
    assert await target.repair(full(folder, 1)) == []
    assert (engine.paused, target.served) == (False, {"a": 1})
    resumed = engine.calls.count("resume")
    assert await target.repair(full(folder, 1)) == []
    assert engine.calls.count("resume") == resumed


async def test_an_engine_that_a_killed_trainer_left_paused_goes_on(folder):
    engine = LocalEngine(folder)
    await engine.pause("retract")
    assert await publisher(a=engine).repair(full(folder, 0)) == []
    assert not engine.paused


async def test_a_cancelled_publication_leaves_no_engine_paused(folder):
    engine = LocalEngine(folder)
    reached = asyncio.Event()

    async def hang(path: str, version: str, *, flush_cache: bool) -> None:
        reached.set()
        await asyncio.Event().wait()

    engine.update_weights = hang  # type: ignore[method-assign]
    task = asyncio.create_task(publisher(a=engine).publish(full(folder, 1)))
    await reached.wait()
    assert engine.paused
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not engine.paused
