"""The background thread, called as slime calls plugins: from a thread without an event loop."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import tomli_w

from records.errors import StoreConflict, StoreUnavailable
from records.names import TurnState
from records.store import Store
from rollout_bridge.slime.host import TurnHost
from rollout_bridge.slime.settings import read_settings
from tests.records.builders import TRAINER, state_of, turn_in
from tests.records.new_store import new_store
from tests.rollout_bridge.slime.runs import run_values, slime_args

T = TypeVar("T")


def on_store(folder: Path, work: Callable[[Store], Awaitable[T]]) -> T:
    """What `work` gives on the run's store, from another connection."""

    async def run() -> T:
        async with await Store.open(new_store(folder / "records.db")) as store:
            return await work(store)

    return asyncio.run(run())


async def four_ready(store: Store) -> list[str]:
    return [await turn_in(store, TurnState.READY) for _ in range(4)]


def states(folder: Path, turn_ids: list[str]) -> list[TurnState]:
    async def ask(store: Store) -> list[TurnState]:
        return [await state_of(store, turn_id) for turn_id in turn_ids]

    return on_store(folder, ask)


def a_host(folder: Path, **handover: Any) -> TurnHost:
    text = tomli_w.dumps(run_values(folder, store={"busy_timeout_s": 0.2}, handover=handover))
    (folder / "config.toml").write_text(text)
    return TurnHost(read_settings(slime_args(folder)))


@pytest.fixture
def host(tmp_path: Path) -> Iterator[TurnHost]:
    opened = a_host(tmp_path)
    yield opened
    opened.close()


def test_turns_go_out_and_are_marked_when_slime_saves(host: TurnHost, tmp_path: Path) -> None:
    turn_ids = on_store(tmp_path, four_ready)
    host.resume(-1)
    batch = host.next_batch(0)
    assert [sample.turn_id for sample in batch.samples] == turn_ids
    assert states(tmp_path, turn_ids) == [TurnState.LEASED] * 4
    host.checkpointed(0)
    assert states(tmp_path, turn_ids) == [TurnState.TRAINED] * 4


def test_closing_keeps_leases_because_slime_may_still_train(tmp_path: Path) -> None:
    turn_ids = on_store(tmp_path, four_ready)
    host = a_host(tmp_path)
    host.resume(-1)
    host.next_batch(0)
    host.close()
    assert states(tmp_path, turn_ids) == [TurnState.LEASED] * 4


def test_a_batch_before_the_checkpoint_is_refused(host: TurnHost) -> None:
    with pytest.raises(RuntimeError, match="before it loaded its checkpoint"):
        host.next_batch(0)


def test_a_save_does_not_wait_for_a_store_that_is_locked(
    host: TurnHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_bridge.slime.leases._HOLD_INTERVAL_S", 0.02)
    turn_ids = on_store(tmp_path, four_ready)
    host.resume(-1)
    host.next_batch(0)
    blocker = sqlite3.connect(tmp_path / "records.db", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    host.checkpointed(0)
    blocker.execute("ROLLBACK")
    blocker.close()
    on_store(tmp_path, four_ready)
    assert len(host.next_batch(1).samples) == 4
    # Marked by the background thread, or by the batch after.
    host.checkpointed(0)
    assert states(tmp_path, turn_ids) == [TurnState.TRAINED] * 4


def test_a_store_that_cannot_be_opened_ends_the_job_in_time(tmp_path: Path) -> None:
    missing = tmp_path / "gone"
    text = tomli_w.dumps(run_values(missing, handover={"store_patience_s": 0.1}))
    (tmp_path / "config.toml").write_text(text)
    host = TurnHost(read_settings(slime_args(tmp_path)))
    with pytest.raises(StoreUnavailable, match="has not answered for"):
        host.resume(-1)
    host.close()


def test_what_ends_the_background_work_reaches_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_bridge.slime.leases._HOLD_INTERVAL_S", 0.02)
    on_store(tmp_path, four_ready)
    host = a_host(tmp_path)
    host.resume(-1)
    host.next_batch(0)

    async def steal(store: Store) -> None:
        connection = sqlite3.connect(tmp_path / "records.db", timeout=30)
        connection.execute("UPDATE turns SET claim_owner = ?", (TRAINER,))
        connection.commit()
        connection.close()

    on_store(tmp_path, steal)
    with pytest.raises(StoreConflict, match="another trainer"):
        call_until_it_fails(host)
    host.close()


def call_until_it_fails(host: TurnHost) -> None:
    while True:
        host.checkpointed(-1)
