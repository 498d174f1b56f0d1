from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from records.errors import StoreConflict, StoreUnavailable
from records.names import DropReason, TurnState
from records.store import Store
from records.training.history.window import HistoryWindow
from records.types import ReadySample, SideSamples, VersionSpan
from rollout_bridge.engine.hold_file import HoldFile
from rollout_bridge.merging import merge_turns
from rollout_bridge.slime.carrier import build
from rollout_bridge.slime.handovers import HandoverError
from rollout_bridge.slime.settings import SlimeConfigError, read_settings
from rollout_bridge.slime.source import TurnSource
from rollout_bridge.stop_order import STOP_FILE, StopOrder, order_stop
from tests.records.builders import OWNER, TRAINER, a_result, a_score, a_version, state_of, turn_in
from tests.records.new_store import new_store
from tests.rollout_bridge.slime.runs import run_values, slime_args

READY, LEASED, TRAINED, DROPPED = (
    TurnState.READY,
    TurnState.LEASED,
    TurnState.TRAINED,
    TurnState.DROPPED,
)


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


class Run:
    """A run folder with its store, in which jobs start and die."""

    def __init__(self, folder: Path, store: Store, clock: Clock) -> None:
        self.folder = folder
        self.store = store
        self.clock = clock

    async def job(
        self, rollout_id: int = -1, start_version: int = 0, *, store: Any = None, **options: Any
    ) -> TurnSource:
        """A new job of slime that loaded the checkpoint of `rollout_id`."""
        needs_experts = options.pop("needs_experts", False)
        args = slime_args(self.folder, update_weight_start_version=start_version, **options)
        source = TurnSource(
            store or self.store,
            read_settings(args),
            needs_experts=needs_experts,
            clock=self.clock,
        )
        await source.resume(rollout_id)
        return source

    async def ready(self, count: int, **changes: Any) -> list[str]:
        return [await turn_in(self.store, READY, **changes) for _ in range(count)]

    async def states(self, turn_ids: list[str]) -> list[TurnState]:
        return [await state_of(self.store, turn_id) for turn_id in turn_ids]


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    clock = Clock()
    async with await Store.open(new_store(tmp_path / "records.db"), clock) as store:
        yield Run(tmp_path, store, clock)


async def handed(source: TurnSource, rollout_id: int) -> list[str]:
    batch = await source.next_batch(rollout_id)
    return [sample.turn_id for sample in batch.samples]


def sampled_at(version: int) -> dict[str, Any]:
    return {"version_spans": (VersionSpan(version=version, start=0, end=3),)}


async def test_turns_are_trained_when_a_checkpoint_contains_their_step(run: Run) -> None:
    turn_ids = await run.ready(8)
    source = await run.job()
    assert await handed(source, 0) == turn_ids[:4]
    assert await handed(source, 1) == turn_ids[4:]
    assert await run.states(turn_ids) == [LEASED] * 8
    # train_async.py asks for the next batch before it saves: that one is not in the checkpoint.
    await source.checkpointed(0)
    assert await run.states(turn_ids) == [TRAINED] * 4 + [LEASED] * 4
    await source.checkpointed(1)
    assert await run.states(turn_ids) == [TRAINED] * 8
    latest = await run.store.latest_version()
    assert latest is not None
    assert (latest.version, latest.parent_version) == (3, 2)


@pytest.mark.parametrize("is_marked", [True, False])
async def test_a_resumed_job_trains_each_turn_once(run: Run, is_marked: bool) -> None:
    """slime's checkpoint decides, whether or not the job lived to mark its turns."""
    turn_ids = await run.ready(8)
    source = await run.job()
    await handed(source, 0)
    await handed(source, 1)
    if is_marked:
        await source.checkpointed(0)
    again = await run.job(0, 3)
    assert await run.states(turn_ids) == [TRAINED] * 4 + [READY] * 4
    assert await handed(again, 1) == turn_ids[4:]
    await again.checkpointed(1)
    assert await run.states(turn_ids) == [TRAINED] * 8


async def test_a_lost_checkpoint_returns_what_it_had_trained(run: Run) -> None:
    turn_ids = await run.ready(4)
    source = await run.job()
    await handed(source, 0)
    await source.checkpointed(0)
    again = await run.job(-1, 2)
    assert await run.states(turn_ids) == [READY] * 4
    assert await handed(again, 0) == turn_ids


async def test_an_asynchronous_checkpoint_counts_once_it_is_written(run: Run) -> None:
    turn_ids = await run.ready(8)
    source = await run.job(async_save=True)
    await handed(source, 0)
    await source.checkpointed(0)
    assert await run.states(turn_ids[:4]) == [LEASED] * 4
    (run.folder / "checkpoints").mkdir()
    (run.folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("0\n")
    await handed(source, 1)
    await source.checkpointed(1)
    assert await run.states(turn_ids) == [TRAINED] * 4 + [LEASED] * 4


async def test_labels_that_were_used_are_refused_with_the_number_to_set(run: Run) -> None:
    await run.ready(4)
    source = await run.job()
    await handed(source, 0)
    with pytest.raises(SlimeConfigError, match="set it to 2 in the file"):
        await run.job(-1, 1)
    await run.ready(1, **sampled_at(9))
    with pytest.raises(SlimeConfigError, match=r"start_version = 2 .* set it to 9"):
        await run.job(-1, 2)


async def test_too_little_traffic_gives_a_smaller_batch(run: Run) -> None:
    turn_ids = await run.ready(3)
    source = await run.job()
    batch = await source.next_batch(0)
    assert [sample.turn_id for sample in batch.samples] == turn_ids
    assert (batch.metrics["handover/turns"], batch.metrics["handover/is_full"]) == (3, 0.0)
    assert batch.metrics["handover/wait_s"] >= 0.2


async def test_nothing_ready_lets_one_waiting_update_through_and_then_waits(run: Run) -> None:
    await run.ready(4)
    source = await run.job()
    await handed(source, 0)
    refresh = await source.next_batch(1)
    assert refresh.samples == []
    assert refresh.metrics["handover/is_refresh"] == 1.0
    assert "handover/staleness_mean" not in refresh.metrics
    waiting = asyncio.create_task(source.next_batch(2))
    await asyncio.sleep(0.6)
    assert not waiting.done()
    [turn_id] = await run.ready(1)
    assert [sample.turn_id for sample in (await waiting).samples] == [turn_id]


async def test_a_new_job_waits_for_its_first_turn(run: Run) -> None:
    source = await run.job()
    waiting = asyncio.create_task(source.next_batch(0))
    await asyncio.sleep(0.6)
    assert not waiting.done()
    await left(waiting)


async def test_staleness_counts_steps_across_restarts(run: Run) -> None:
    source = await run.job()
    await run.ready(4, **sampled_at(1))
    assert (await source.next_batch(0)).version_gaps == [0] * 4
    await source.checkpointed(0)
    # The weights of version 2 are those that the new job calls 3.
    again = await run.job(0, 2)
    await run.ready(1, **sampled_at(1))
    await run.ready(1, **sampled_at(2))
    await run.ready(2, **sampled_at(3))
    batch = await again.next_batch(1)
    assert batch.version_gaps == [1, 0, 0, 0]
    assert batch.metrics["handover/staleness_mean"] == 0.25


async def test_stale_turns_expire_before_a_batch_is_leased(run: Run) -> None:
    (run.folder / "config.toml").write_text(
        tomli_w.dumps(run_values(run.folder, trainer={"max_staleness": 0}))
    )
    source = await run.job()
    old = await run.ready(5, **sampled_at(1))
    assert await handed(source, 0) == old[:4]
    fresh = await run.ready(4, **sampled_at(2))
    batch = await source.next_batch(1)
    assert [sample.turn_id for sample in batch.samples] == fresh
    assert batch.metrics["handover/expired_stale"] == 1
    assert await state_of(run.store, old[4]) is DROPPED


async def test_labels_that_no_engine_of_this_job_has_end_it(run: Run) -> None:
    source = await run.job()
    await run.ready(4, **sampled_at(3))
    with pytest.raises(HandoverError, match=r"versions 3 to 3, but this job's weights are 1 to 1"):
        await source.next_batch(0)


async def test_engines_that_count_from_1_again_end_the_job(run: Run) -> None:
    source = await run.job(start_version=40)
    run.clock.now += 1000.0
    await run.ready(4, **sampled_at(1))
    with pytest.raises(HandoverError, match="slime must count from update_weight_start_version"):
        await source.next_batch(0)


async def test_turns_that_cannot_train_are_dropped_with_their_reason(run: Run) -> None:
    turn_ids = await run.ready(4)
    source = await run.job(needs_experts=True)
    waiting = asyncio.create_task(source.next_batch(0))
    await asyncio.sleep(0.4)
    shape = np.zeros((6, 2, 2), dtype=np.int16)
    [usable] = await run.ready(1, routed_experts=shape)
    batch = await waiting
    assert [sample.turn_id for sample in batch.samples] == [usable]
    assert batch.metrics["handover/dropped_routed_experts_missing"] == 4
    assert await run.store.drops() == {DropReason.ROUTED_EXPERTS_MISSING: 4}
    assert await run.states(turn_ids) == [DROPPED] * 4


async def test_turns_that_lack_what_the_objective_needs_are_dropped(run: Run) -> None:
    turn_ids = await run.ready(4)
    needs = {"teacher": True, "reward": False, "compared": False, "top_k": 8}
    source = await run.job(hindsight_needs=needs)
    waiting = asyncio.create_task(source.next_batch(0))
    for _ in range(100):
        if sum((await run.store.drops()).values()) == 4:
            break
        await asyncio.sleep(0.05)
    await left(waiting)
    assert await run.store.drops() == {DropReason.TEACHER_LOGPROBS_INVALID: 4}
    assert await run.states(turn_ids) == [DROPPED] * 4


async def test_turns_without_side_samples_are_dropped_and_others_bring_theirs(run: Run) -> None:
    lacking = await run.ready(2)
    needs = {"teacher": True, "reward": False, "compared": False, "top_k": 0}
    source = await run.job(hindsight_needs=needs | {"side_source": "policy", "side_samples": 2})
    drawn = SideSamples(
        ids=np.array([[1, 2], [3, 3], [4, 5]], dtype=np.int32),
        rollout_logprobs=np.full((3, 2), -1.5, dtype=np.float32),
        teacher_logprobs=np.full((3, 2), -0.5, dtype=np.float32),
        policy_version=0,
    )
    usable = [await turn_in(run.store, TurnState.SCORING) for _ in range(4)]
    for turn_id in usable:
        scores = [a_score(turn_id)]
        assert await run.store.commit_scores(OWNER, scores, side_samples=drawn)
    batch = await source.next_batch(0)
    assert {one.turn_id for one in batch.samples} == set(usable)
    assert await run.store.drops() == {DropReason.SAMPLING_WEIGHTS_GONE: 2}
    assert batch.metrics["handover/dropped_sampling_weights_gone"] == 2
    assert await run.states(lacking) == [DROPPED] * 2
    carriers = build(batch.samples, merge_turns(batch.samples), batch.version_gaps)
    for carrier in pickle.loads(pickle.dumps(carriers)):
        for turn in carrier.turns:
            assert turn.sample.side_samples.ids.tolist() == drawn.ids.tolist()
            assert turn.sample.side_samples.teacher_logprobs[0, 0] == -0.5


async def test_turns_bring_the_earlier_answers_that_the_objective_needs(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run.ready(4)
    needs = {"teacher": True, "reward": False, "compared": False, "top_k": 0, "past_versions": 4}
    source = await run.job(hindsight_needs=needs)
    original, asked = Store.lease, []

    async def lease(store: Store, **arguments: Any) -> list[ReadySample]:
        asked.append(arguments["history"])
        return await original(store, **arguments)

    monkeypatch.setattr(Store, "lease", lease)
    await handed(source, 0)
    assert asked == [HistoryWindow(versions=4)]


async def test_another_trainer_on_the_store_ends_the_job(run: Run) -> None:
    await run.ready(4)
    source = await run.job()
    await handed(source, 0)
    run.clock.now += 10_000.0
    assert len(await run.store.lease(owner=TRAINER, count=4, ttl_s=60.0)) == 4
    await run.ready(4)
    with pytest.raises(StoreConflict, match="another trainer"):
        await source.next_batch(1)


async def test_leases_that_ran_out_are_still_the_steps_own(run: Run) -> None:
    turn_ids = await run.ready(4)
    source = await run.job()
    await handed(source, 0)
    run.clock.now += 10_000.0
    fresh = await run.ready(4, **sampled_at(1))
    assert await handed(source, 1) == fresh
    await source.checkpointed(1)
    assert await run.states(turn_ids + fresh) == [TRAINED] * 8


async def test_leases_are_held_in_the_background(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_bridge.slime.leases._HOLD_INTERVAL_S", 0.02)
    turn_ids = await run.ready(4)
    source = await run.job()
    await handed(source, 0)
    async with holding(source):
        run.clock.now += 10_000.0
        await asyncio.sleep(0.3)
        assert await run.store.lease(owner=TRAINER, count=4, ttl_s=60.0) == []
    assert await run.states(turn_ids) == [LEASED] * 4


@asynccontextmanager
async def holding(source: TurnSource) -> AsyncIterator[None]:
    task = asyncio.create_task(source.hold())
    try:
        yield
    finally:
        await left(task)


async def left(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait until it has ended, as its owner must before the store closes."""
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


class FlakyStore:
    """A store whose methods fail as often as they are told, before or after they took effect."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.failures: dict[str, int] = {}
        self.lost_answers: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        async def call(*args: Any, **options: Any) -> Any:
            if self.failures.get(name, 0) > 0:
                self.failures[name] -= 1
                raise StoreUnavailable("the database does not answer")
            result = await method(*args, **options)
            if self.lost_answers.get(name, 0) > 0:
                self.lost_answers[name] -= 1
                raise StoreUnavailable("the database hung up")
            return result

        return call


@pytest.mark.parametrize("fault", ["failures", "lost_answers"])
@pytest.mark.parametrize("method", ["ready_count", "lease", "expire_stale", "extend_leases"])
async def test_a_store_that_goes_away_while_a_batch_fills_loses_nothing(
    run: Run, method: str, fault: str
) -> None:
    turn_ids = await run.ready(8)
    store = FlakyStore(run.store)
    source = await run.job(store=store)
    first = await handed(source, 0)
    getattr(store, fault)[method] = 3
    batch = await source.next_batch(1)
    assert first + [sample.turn_id for sample in batch.samples] == turn_ids
    assert batch.metrics["handover/store_unavailable_s"] > 0
    assert await run.states(turn_ids) == [LEASED] * 8


@pytest.mark.parametrize("fault", ["failures", "lost_answers"])
async def test_a_job_waits_for_the_store_when_it_starts(run: Run, fault: str) -> None:
    store = FlakyStore(run.store)
    for method in ("highest_version", "counts", "reconcile"):
        getattr(store, fault)[method] = 2
    source = await run.job(store=store)
    assert source.version == 1


async def test_patience_with_the_store_ends(run: Run) -> None:
    (run.folder / "config.toml").write_text(
        tomli_w.dumps(run_values(run.folder, handover={"store_patience_s": 0.1}))
    )
    store = FlakyStore(run.store)
    source = await run.job(store=store)
    store.failures["ready_count"] = 10_000
    with pytest.raises(StoreUnavailable, match="has not answered for"):
        await source.next_batch(0)


@pytest.mark.parametrize("fault", ["failures", "lost_answers"])
async def test_marking_that_failed_is_made_up_for(
    run: Run, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr("rollout_bridge.slime.leases._HOLD_INTERVAL_S", 0.02)
    turn_ids = await run.ready(4)
    store = FlakyStore(run.store)
    source = await run.job(store=store)
    await handed(source, 0)
    getattr(store, fault)["commit_handed_over"] = 1
    with pytest.raises(StoreUnavailable):
        await source.checkpointed(0)
    async with holding(source), asyncio.timeout(60):
        while await run.states(turn_ids) != [TRAINED] * 4:
            await asyncio.sleep(0.01)
    await run.ready(4)
    assert len(await handed(source, 1)) == 4


async def test_a_store_that_another_trainer_trained_is_refused(run: Run) -> None:
    turn_id = await turn_in(run.store, LEASED)
    await run.store.commit_step(version=a_version(1), results=[a_result(turn_id)])
    with pytest.raises(HandoverError, match="1 trained turns"):
        await run.job(-1, 1)
    assert await state_of(run.store, turn_id) is TRAINED


async def test_turns_before_the_checkpoint_are_refused(run: Run) -> None:
    source = TurnSource(run.store, read_settings(slime_args(run.folder)), clock=run.clock)
    with pytest.raises(HandoverError, match="did not load its checkpoint"):
        await source.next_batch(0)


async def test_sync_holds_generation_from_a_batch_until_the_next_one_is_asked_for(run: Run) -> None:
    schedule = {"schedule": "sync", "max_hold_s": 60.0}
    values = run_values(run.folder, trainer=schedule, handover={"max_wait_s": 60.0})
    (run.folder / "config.toml").write_text(tomli_w.dumps(values))
    source, hold = await run.job(), HoldFile(run.folder)
    turn_ids = await run.ready(6, **sampled_at(1))
    assert await handed(source, 0) == turn_ids[:4]
    order = hold.holds()
    assert order is not None
    assert order.until - order.since == pytest.approx(60.0)
    waiting = asyncio.create_task(source.next_batch(1))
    async with asyncio.timeout(20):
        while hold.current() != "ended":
            await asyncio.sleep(0.01)
    fresh = await run.ready(4, **sampled_at(2))
    batch = await waiting
    assert await run.states(turn_ids[4:]) == [DROPPED] * 2
    assert await run.store.drops() == {DropReason.STALE: 2}
    assert [sample.turn_id for sample in batch.samples] == fresh
    assert batch.version_gaps == [0] * 4
    assert hold.holds() is not None
    assert batch.metrics["hold/holds"] == batch.metrics["hold/ended_served"] == 1.0
    assert batch.metrics["hold/total_seconds"] == batch.metrics["hold/seconds"] > 0.0
    source.end_hold()


async def test_a_hold_ends_when_training_is_stopped_in_the_middle_of_a_step(run: Run) -> None:
    schedule = {"schedule": "sync", "max_hold_s": 60.0}
    values = run_values(run.folder, trainer=schedule)
    (run.folder / "config.toml").write_text(tomli_w.dumps(values))
    source, hold = await run.job(), HoldFile(run.folder)
    await run.ready(4, **sampled_at(1))
    async with holding(source):
        await handed(source, 0)
        assert hold.holds() is not None
        order_stop(run.folder, StopOrder(reason="a person"))
        async with asyncio.timeout(20):
            while hold.current() != "ended":
                await asyncio.sleep(0.01)
    (run.folder / STOP_FILE).unlink()
    await run.ready(4, **sampled_at(2))
    assert (await source.next_batch(1)).metrics["hold/ended_stopped"] == 1.0
    source.end_hold()


async def test_steps_off_is_the_bound_of_the_asynchronous_driver(run: Run) -> None:
    schedule = {"schedule": "step_off", "steps_off": 1}
    values = run_values(run.folder, trainer=schedule)
    (run.folder / "config.toml").write_text(tomli_w.dumps(values))
    source = await run.job()
    turn_ids = await run.ready(12, **sampled_at(1))
    assert await handed(source, 0) == turn_ids[:4]
    assert HoldFile(run.folder).holds() is None
    assert await handed(source, 1) == turn_ids[4:8]
    assert (await source.next_batch(2)).samples == []
    assert await run.states(turn_ids[8:]) == [DROPPED] * 4
