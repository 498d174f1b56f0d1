"""Workers at work, for tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from judge.worker import JudgeWorker
from records.names import TurnState
from records.store import Store
from rollout_bridge.scoring.scoring import ScoringWorker

Worker = JudgeWorker | ScoringWorker


@contextlib.asynccontextmanager
async def running(worker: Worker) -> AsyncIterator[None]:
    """The worker at work; if it fails, so does the body, at once."""
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(worker.run(stop))
        try:
            yield
        finally:
            stop.set()


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.02)


async def run_until_left(store: Store, state: TurnState, worker: Worker) -> None:
    """Until no turn is in this state any more."""

    async def none_left() -> bool:
        return (await store.counts())[state] == 0

    async with running(worker):
        await until(none_left, timeout_s=240.0)
