"""A job that goes back to an older version: what the store and the records make of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from records.names import TurnState
from records.store import Store
from rollout_bridge.guard.checks import add_check
from rollout_bridge.slime.handovers import HandoverError, HandoverLog
from rollout_bridge.slime.settings import SlimeConfigError, read_settings
from rollout_bridge.slime.source import TurnSource
from rollout_bridge.stop_order import ROLLBACK_FILE, StopOrder, order_stop
from tests.records.new_store import new_store
from tests.rollout_bridge.guard.test_checks import a_check
from tests.rollout_bridge.slime.runs import run_values, slime_args
from tests.rollout_bridge.slime.test_source import Clock, Run, handed

READY, LEASED, TRAINED = TurnState.READY, TurnState.LEASED, TurnState.TRAINED
BACK_TO_3 = {"hindsight_rollback": {"restores": 3, "parent": 5}}


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    clock = Clock()
    async with await Store.open(new_store(tmp_path / "records.db"), clock) as store:
        yield Run(tmp_path, store, clock)


async def five_steps(run: Run) -> list[str]:
    """Versions 2 to 6, of four turns each. The checkpoint of rollout 1 has version 3; 4 and 5 were
    served, 6 was not.
    """
    turn_ids = await run.ready(20)
    source = await run.job()
    for rollout_id in range(5):
        await handed(source, rollout_id)
        if rollout_id == 1:
            await source.checkpointed(1)
    return turn_ids


async def test_what_withdrawn_versions_trained_stays_trained_and_never_trains_again(
    run: Run,
) -> None:
    turn_ids = await five_steps(run)
    assert await run.states(turn_ids) == [TRAINED] * 8 + [LEASED] * 12
    back = await run.job(1, 6, **BACK_TO_3)
    # Version 6 was never served: its turns train anew.
    assert await run.states(turn_ids) == [TRAINED] * 16 + [READY] * 4
    assert await run.store.versions_given_up() == {4, 5}
    assert back.version == 7
    assert await handed(back, 2) == turn_ids[16:]
    await back.checkpointed(2)
    assert await run.states(turn_ids) == [TRAINED] * 20


async def test_a_rollback_is_a_link_of_the_chain(run: Run) -> None:
    await five_steps(run)
    await run.job(1, 6, **BACK_TO_3)
    chain = HandoverLog(run.folder).newest_chain()
    assert [one.version for one in chain] == [1, 2, 3, 4, 5, 7]
    assert (chain[-1].restores, chain[-1].parent_version, chain[-1].rollout_id) == (3, 5, 1)
    latest = await run.store.latest_version()
    assert latest is not None
    assert (latest.version, latest.parent_version, latest.restores) == (7, 5, 3)
    assert latest.manifest_hash == chain[-1].hash


@pytest.mark.parametrize("loaded", [1, 2])
async def test_a_job_that_dies_after_a_rollback_does_not_return_to_withdrawn_weights(
    run: Run, loaded: int
) -> None:
    """It resumes from the checkpoint that was gone back to (1), or from its own first one (2)."""
    turn_ids = await five_steps(run)
    back = await run.job(1, 6, **BACK_TO_3)
    await handed(back, 2)
    again = await run.job(loaded, 8)
    chain = HandoverLog(run.folder).newest_chain()
    assert [one.version for one in chain] == [1, 2, 3, 4, 5, 7, *([8] if loaded == 2 else []), 9]
    assert await run.store.versions_given_up() >= {4, 5}
    assert await run.states(turn_ids[:16]) == [TRAINED] * 16
    assert await run.states(turn_ids[16:]) == [TRAINED if loaded == 2 else READY] * 4
    assert again.version == 9


async def test_a_rollback_that_was_cut_short_is_done_once_by_the_next_job(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after the store was told, before the record was written."""
    turn_ids = await five_steps(run)

    def killed(self: HandoverLog, record: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(HandoverLog, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            await run.job(1, 6, **BACK_TO_3)
    assert await run.store.highest_version() == 7
    back = await run.job(1, 7, **BACK_TO_3)
    assert back.version == 8
    assert await run.states(turn_ids) == [TRAINED] * 16 + [READY] * 4
    assert await run.store.versions_given_up() == {4, 5, 7}
    assert HandoverLog(run.folder).newest_chain()[-1].restores == 3


async def test_a_job_that_loaded_something_else_ends(run: Run) -> None:
    await five_steps(run)
    with pytest.raises(HandoverError, match=r"goes back to version 3.*rollout 1, but .* rollout 3"):
        await run.job(3, 6, **BACK_TO_3)


async def test_a_note_that_names_no_version_is_refused(run: Run) -> None:
    with pytest.raises(SlimeConfigError, match="hindsight_rollback"):
        read_settings(slime_args(run.folder, hindsight_rollback={"restores": "best"}))


@pytest.mark.parametrize("order", ["rollback", "stop"])
async def test_a_job_that_is_to_go_back_is_given_no_turns(
    run: Run, order: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is pipelined is given an empty batch, after which the last step is served."""
    await run.ready(4)
    source = await run.job()
    await handed(source, 0)
    turn_ids = await run.ready(4)
    if order == "stop":
        order_stop(run.folder, StopOrder(reason="it drifts", serve_version=1))
    else:
        (run.folder / ROLLBACK_FILE).write_text("1\n")
    assert await handed(source, 1) == []
    waiting = asyncio.create_task(handed(source, 2))
    await asyncio.sleep(0.5)
    assert not waiting.done()
    assert await run.states(turn_ids) == [READY] * 4
    assert caplog.text.count("the launch ends this job") == 1
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_each_version_waits_for_the_guard(tmp_path: Path) -> None:
    """See tests/rollout_bridge/guard for what counts as checked."""
    values = run_values(tmp_path, guard={"canaries": "/shared/canaries.jsonl"})
    (tmp_path / "config.toml").write_text(tomli_w.dumps(values))
    async with await Store.open(new_store(tmp_path / "records.db")) as store:
        run = Run(tmp_path, store, Clock())
        settings = read_settings(slime_args(tmp_path))
        assert not settings.is_pipelined
        turn_ids = await run.ready(4)
        source = TurnSource(store, settings)
        await source.resume(-1)
        waiting = asyncio.create_task(handed(source, 0))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        add_check(tmp_path, a_check(1).model_copy(update={"breaches": ["too long"]}))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        add_check(tmp_path, a_check(1))
        assert await waiting == turn_ids
