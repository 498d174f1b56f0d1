"""The loop that stages share, on a real store, with stages that wait, fail and crash to order."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

from records.config import StoreConfig
from records.errors import StoreUnavailable
from records.names import DropReason, TurnState, TurnType
from records.store import Store
from records.types import CapturedTurn, TurnRecord, VersionSpan
from rollout_bridge.config import ClaimLoopConfig
from rollout_bridge.worker import ClaimLoop, ServiceUnavailable, StageStopped

OWNER = "loop-1"


def config(**options: Any) -> ClaimLoopConfig:
    values = {"pause_min_s": 0.01, "pause_max_s": 0.05, "poll_max_s": 0.02, "stop_grace_s": 1.0}
    return ClaimLoopConfig(**(values | options))


async def add_turns(store: Store, count: int) -> list[str]:
    return [await add_turn(store) for _ in range(count)]


async def add_turn(store: Store) -> str:
    session_id = await store.ensure_session(scope="s", external_id=None)
    turn = CapturedTurn(
        turn_id=uuid4().hex,
        session_id=session_id,
        parent_turn_id=None,
        turn_type=TurnType.MAIN,
        messages=[{"role": "user", "content": uuid4().hex}],
        tools=[],
        response={"role": "assistant", "content": "hello"},
        prompt_ids=np.array([1, 2], dtype=np.int32),
        response_ids=np.array([3], dtype=np.int32),
        rollout_logprobs=np.array([-0.5], dtype=np.float32),
        token_parent_id=None,
        num_shared_ids=0,
        sampling={"temperature": 1.0},
        distribution_modified=None,
        version_spans=(VersionSpan(version=0, start=0, end=1),),
        finish_reason="stop",
        latency_s=0.1,
    )
    await store.record_turn(turn, scope="s")
    await store.set_next_state(turn.turn_id, [{"role": "user", "content": "thanks"}])
    return turn.turn_id


class DropStage:
    """Ends each turn with a drop, after `before(turn)` has done what the test wants."""

    state = TurnState.JUDGING

    def __init__(
        self,
        store: Store,
        before: Callable[[TurnRecord], Awaitable[None]] | None = None,
        owner: str = OWNER,
    ) -> None:
        self.store, self.before, self.owner = store, before, owner
        self.attempts: Counter[str] = Counter()
        self.done: list[str] = []
        self.given_up: list[str] = []

    async def process(self, turn: TurnRecord) -> None:
        self.attempts[turn.turn_id] += 1
        if self.before is not None:
            await self.before(turn)
        if await self.store.drop(self.owner, turn.turn_id, DropReason.NO_HINT):
            self.done.append(turn.turn_id)

    async def give_up(self, turn: TurnRecord, error: ServiceUnavailable) -> None:
        await self.store.drop(self.owner, turn.turn_id, DropReason.JUDGE_UNAVAILABLE, str(error))
        self.given_up.append(turn.turn_id)


async def run_while(
    loop: ClaimLoop, unfinished: Callable[[], bool], timeout_s: float = 20.0
) -> None:
    stop = asyncio.Event()
    async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
        group.create_task(loop.run(stop))
        while unfinished():
            await asyncio.sleep(0.01)
        stop.set()


async def test_every_turn_is_processed_once(store):
    turn_ids = await add_turns(store, 50)
    stage = DropStage(store)
    loop = ClaimLoop(store, stage, owner=OWNER, config=config(concurrency=7))
    await run_while(loop, lambda: len(stage.done) < 50)
    assert sorted(stage.done) == sorted(turn_ids)
    assert set(stage.attempts.values()) == {1}


async def test_no_more_turns_than_configured_are_in_flight_and_slots_refill_at_once(store):
    await add_turns(store, 12)
    in_flight, most = 0, 0
    slow = asyncio.Event()

    async def before(turn: TurnRecord) -> None:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        is_first = stage.attempts.total() == 1
        await asyncio.sleep(0.01)
        if is_first:
            await slow.wait()  # the first turn holds its slot while all the others pass by
        in_flight -= 1

    stage = DropStage(store, before)
    loop = ClaimLoop(store, stage, owner=OWNER, config=config(concurrency=3))

    def unfinished() -> bool:
        if len(stage.done) == 11:
            slow.set()
        return len(stage.done) < 12

    await run_while(loop, unfinished)
    assert most == 3


async def test_turns_that_come_later_are_found(store):
    stage = DropStage(store)
    loop = ClaimLoop(store, stage, owner=OWNER, config=config())
    stop = asyncio.Event()
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(loop.run(stop))
        for number in range(1, 4):
            await asyncio.sleep(0.05)
            await add_turn(store)
            while len(stage.done) < number:
                await asyncio.sleep(0.01)
        stop.set()


async def test_a_claim_is_kept_alive_while_the_turn_is_worked_on(store):
    await add_turn(store)

    async def before(turn: TurnRecord) -> None:
        await asyncio.sleep(1.0)  # many times the claim's life

    first, second = DropStage(store, before), DropStage(store, owner="loop-2")
    settings = config(claim_ttl_s=0.3)
    loops = [
        ClaimLoop(store, first, owner=OWNER, config=settings),
        ClaimLoop(store, second, owner="loop-2", config=settings),
    ]
    stop = asyncio.Event()
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(loops[0].run(stop))
        await asyncio.sleep(0.1)
        group.create_task(loops[1].run(stop))
        while not first.done:
            await asyncio.sleep(0.01)
        stop.set()
    assert second.attempts == {}


async def test_a_failing_turn_does_not_hold_up_the_queue_nor_starve_behind_it(store):
    (*others, first) = await add_turns(store, 60)  # the newest is claimed first

    async def before(turn: TurnRecord) -> None:
        await asyncio.sleep(0.005)
        if turn.turn_id == first and stage.attempts[first] <= 2:
            raise ServiceUnavailable("not now")

    stage = DropStage(store, before)
    loop = ClaimLoop(store, stage, owner=OWNER, config=config(concurrency=1))
    await run_while(loop, lambda: len(stage.done) < 60)
    assert stage.attempts[first] == 3
    # It came back long before the queue was empty.
    assert 0 < stage.done.index(first) < 50
    assert all(stage.attempts[turn_id] == 1 for turn_id in others)
    assert not loop._aside


async def test_an_outage_gives_nothing_up_however_long_the_failures(store):
    await add_turns(store, 10)
    down = True

    async def before(turn: TurnRecord) -> None:
        if down:
            raise ServiceUnavailable("down")

    stage = DropStage(store, before)
    loop = ClaimLoop(store, stage, owner=OWNER, config=config(concurrency=2, max_attempts=2))

    def unfinished() -> bool:
        nonlocal down
        down = down and stage.attempts.total() < 40
        return len(stage.done) < 10

    await run_while(loop, unfinished)
    assert stage.given_up == []


async def test_failing_turns_alone_do_not_block_a_service_that_works_for_others(store):
    # More bad turns at the head of the queue than there are slots.
    bad = set(await add_turns(store, 8))
    good = await add_turns(store, 5)

    async def before(turn: TurnRecord) -> None:
        if turn.turn_id in bad:
            raise ServiceUnavailable("bad")

    stage = DropStage(store, before)
    settings = config(concurrency=4, max_attempts=2, pause_max_s=0.02)
    loop = ClaimLoop(store, stage, owner=OWNER, config=settings)

    def all_good_done() -> bool:
        return len(stage.done) < len(good)

    await run_while(loop, all_good_done)
    assert sorted(stage.done) == sorted(good)


async def test_the_service_may_ask_to_be_left_alone(store):
    await add_turn(store)

    async def before(turn: TurnRecord) -> None:
        if stage.attempts.total() == 1:
            raise ServiceUnavailable("later", retry_after_s=0.4)

    stage = DropStage(store, before)
    loop = ClaimLoop(store, stage, owner=OWNER, config=config())
    started = asyncio.get_running_loop().time()
    await run_while(loop, lambda: not stage.done)
    assert asyncio.get_running_loop().time() - started >= 0.4


async def test_a_turn_that_crashes_the_stage_is_dropped_and_others_go_on(store):
    turn_ids = await add_turns(store, 8)

    async def before(turn: TurnRecord) -> None:
        if turn.turn_id == turn_ids[2]:
            raise ZeroDivisionError("a mistake in the program")
        await asyncio.sleep(0.02)

    stage = DropStage(store, before)
    loop = ClaimLoop(store, stage, owner=OWNER, config=config(concurrency=2, max_attempts=2))

    async def dropped() -> bool:
        turn = await store.turn(turn_ids[2])
        return turn is not None and turn.drop_reason is DropReason.INTERNAL_ERROR

    stop = asyncio.Event()
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(loop.run(stop))
        while not (len(stage.done) >= 7 and await dropped()):
            if len(stage.done) >= 7:
                # The turn is at fault only if others succeed in between.
                turn_ids.append(await add_turn(store))
            await asyncio.sleep(0.02)
        stop.set()
    assert turn_ids[2] not in stage.given_up


async def test_a_mistake_that_hits_every_turn_drops_none(store):
    await add_turns(store, 4)

    async def before(turn: TurnRecord) -> None:
        raise ZeroDivisionError("a mistake in the program")

    stage = DropStage(store, before)
    loop = ClaimLoop(store, stage, owner=OWNER, config=config(concurrency=2, max_attempts=2))
    await run_while(loop, lambda: stage.attempts.total() < 12)
    assert (await store.counts())[TurnState.JUDGING] == 4


async def test_a_stage_that_must_stop_ends_the_loop_and_frees_all_claims(store):
    turn_ids = await add_turns(store, 5)

    async def before(turn: TurnRecord) -> None:
        if turn.turn_id == turn_ids[2]:
            raise StageStopped("another teacher")
        await asyncio.sleep(60)

    stage = DropStage(store, before)
    loop = ClaimLoop(store, stage, owner=OWNER, config=config(claim_ttl_s=600.0))
    with pytest.raises(StageStopped) as caught:
        await asyncio.wait_for(loop.run(asyncio.Event()), 20)
    assert caught.value.__notes__ == [f"while loop-1 worked on turn {turn_ids[2]}"]
    assert len(await store.claim(TurnState.JUDGING, owner="next", limit=9, ttl_s=60)) == 5


async def test_cancelling_the_loop_frees_its_claims(store):
    await add_turns(store, 5)
    started = asyncio.Event()

    async def before(turn: TurnRecord) -> None:
        started.set()
        await asyncio.sleep(60)

    stage = DropStage(store, before)
    loop = ClaimLoop(store, stage, owner=OWNER, config=config(claim_ttl_s=600.0, concurrency=2))
    task = asyncio.create_task(loop.run(asyncio.Event()))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(await store.claim(TurnState.JUDGING, owner="next", limit=9, ttl_s=60)) == 5


class LockedStore:
    """The store with a database that is locked for the first calls of each kind."""

    def __init__(self, store: Store, failures: int) -> None:
        self.store = store
        self.left = dict.fromkeys(("claim", "extend_claims", "drop"), failures)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            if self.left.get(name):
                self.left[name] -= 1
                raise StoreUnavailable("database is locked")
            return await method(*args, **kwargs)

        return call


async def test_a_locked_database_delays_but_loses_nothing(store):
    turn_ids = await add_turns(store, 6)
    locked: Any = LockedStore(store, failures=3)

    async def before(turn: TurnRecord) -> None:
        await asyncio.sleep(0.15)

    stage = DropStage(locked, before)
    settings = config(concurrency=3, claim_ttl_s=0.3)
    loop = ClaimLoop(locked, stage, owner=OWNER, config=settings)
    await run_while(loop, lambda: len(stage.done) < 6)
    assert sorted(stage.done) == sorted(turn_ids)
    assert stage.given_up == []
    assert locked.left["claim"] == locked.left["drop"] == 0


def hold_claims_for_ever(folder: str, claimed: Any) -> None:
    """The body of a process that will be killed in the middle of its work."""

    async def main() -> None:
        async with await Store.open(StoreConfig.sqlite(Path(folder) / "records.db")) as store:

            async def before(turn: TurnRecord) -> None:
                claimed.release()
                await asyncio.sleep(60)

            stage = DropStage(store, before, owner="killed")
            settings = config(claim_ttl_s=1.0)
            await ClaimLoop(store, stage, owner="killed", config=settings).run(asyncio.Event())

    asyncio.run(main())


async def test_a_killed_process_loses_nothing(store, tmp_path):
    turn_ids = await add_turns(store, 5)
    context = multiprocessing.get_context("spawn")
    claimed = context.Semaphore(0)
    process = context.Process(target=hold_claims_for_ever, args=(str(tmp_path), claimed))
    process.start()
    for _ in turn_ids:
        assert await asyncio.to_thread(claimed.acquire, True, 30)
    assert await store.claim(TurnState.JUDGING, owner=OWNER, limit=9, ttl_s=60) == []
    process.kill()
    await asyncio.to_thread(process.join)
    stage = DropStage(store)
    loop = ClaimLoop(store, stage, owner=OWNER, config=config())
    await run_while(loop, lambda: len(stage.done) < 5)
    assert sorted(stage.done) == sorted(turn_ids)
