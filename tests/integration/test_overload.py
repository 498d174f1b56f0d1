"""Three times as many turns as the judge can take: what is judged is fresh enough to train.

Real store, judge worker, scoring worker, leases and steps; the judge answers after a fixed time,
and a step takes one. Printed beside it: the same traffic judged oldest first (`-s` shows it).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from aiohttp import web
from sqlalchemy import Connection, select

from judge.config import JudgeConfig
from judge.worker import JudgeWorker
from records.config import StoreConfig
from records.names import TurnType
from records.queue import waiting
from records.queue.freshness import Freshness
from records.store import Store
from records.tables.models import TurnRow, VerdictRow
from records.training.share import Share
from records.training.staleness import oldest_allowed
from records.training.step_results import SampleResult
from records.types import CapturedTurn, VersionSpan
from rollout_bridge.config import ClaimLoopConfig, RendererConfig
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.config import EngineClientConfig
from rollout_bridge.rendering.rendering import Rendering
from rollout_bridge.scoring.scoring import ScoringWorker
from tests.judge.conftest import Reply
from tests.records.builders import a_version
from tests.rollout_bridge import fault_teacher
from tests.rollout_bridge.chat_tokenizers import write_tokenizer
from tests.workers import running, until

pytestmark = [pytest.mark.long, pytest.mark.alone]

FRESHNESS = Freshness(max_staleness=3, batch_size=2)
CONCURRENCY, LATENCY_S = 4, 0.8
CAPACITY = CONCURRENCY / LATENCY_S
"""Turns that the judge can take in a second."""
SECONDS = 20.0
STEP_S = 0.1
TENANTS = (*("busy",) * 19, "few")
"""Whose the turns are, in turn: one tenant sends less than its equal part of the capacity, also of
what a judge takes on a machine that has other work.
"""
ANSWERS = (
    "\\boxed{1}\n[HINT_START]Give temperatures in Celsius.[HINT_END]",
    "\\boxed{-1}",
)


@dataclass
class Outcome:
    """What became of the turns: by (tenant, whether it has a hint, state or drop reason)."""

    counts: Counter[tuple[str, bool, str]]

    def number(self, where: str, *, hinted: bool | None = None, scope: str | None = None) -> int:
        return sum(
            n
            for (of, has_hint, became), n in self.counts.items()
            if became == where and hinted in (None, has_hint) and scope in (None, of)
        )

    @property
    def expired(self) -> float:
        """Share of the accepted live lessons that trained or went stale which went stale."""
        stale = self.number("stale", hinted=True)
        return stale / max(stale + self.number("trained"), 1)

    def judged_share(self, scope: str) -> float:
        """Share of a tenant's turns that the judge saw in time, of those that it saw or let go."""
        judged = sum(
            n
            for (of, _, became), n in self.counts.items()
            if of == scope and became not in ("over_capacity", "judging", "hint_only")
        )
        return judged / (judged + self.number("over_capacity", scope=scope))


@pytest.fixture(scope="module")
def rendering(tmp_path_factory: pytest.TempPathFactory) -> Rendering:
    folder = write_tokenizer(tmp_path_factory.mktemp("model"), "chat_template_thinking.jinja")
    return Rendering.load(folder, RendererConfig(name="qwen3"))


@pytest.fixture
async def judge_url() -> AsyncIterator[str]:
    """A judge that asks for a hint every other time, always after the same wait."""
    numbers = itertools.count()

    async def answer(_: web.Request) -> web.Response:
        text = ANSWERS[next(numbers) % 2]
        await asyncio.sleep(LATENCY_S)
        return web.json_response(text=Reply.answer(text).body)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    await runner.cleanup()


class Traffic:
    """Agents that send turns at a pace, and a trainer; both go on until they are cancelled."""

    def __init__(self, store: Store, rendering: Rendering) -> None:
        self.store = store
        self.prompt_ids = rendering.prompt_ids(fault_teacher.MESSAGES)
        self.chain: list[int] = []
        self.sent = 0

    async def start(self) -> None:
        """The start weights are a version, too."""
        await self._step([])

    async def send(self, seconds: float, per_second: float) -> None:
        begun = time.monotonic()
        while (passed := time.monotonic() - begun) < seconds:
            while self.sent < passed * per_second:
                await self._turn(TENANTS[self.sent % len(TENANTS)])
                self.sent += 1
            await asyncio.sleep(0.01)

    async def _turn(self, scope: str) -> None:
        turn = CapturedTurn(
            turn_id=uuid4().hex,
            session_id=await self.store.ensure_session(scope=scope, external_id=None),
            parent_turn_id=None,
            turn_type=TurnType.MAIN,
            messages=fault_teacher.MESSAGES,
            tools=[],
            response={"role": "assistant", "content": "50 F"},
            prompt_ids=self.prompt_ids,
            response_ids=fault_teacher.RESPONSE,
            rollout_logprobs=np.full(3, -0.5, dtype=np.float32),
            token_parent_id=None,
            num_shared_ids=0,
            sampling={"temperature": 1.0},
            distribution_modified=None,
            version_spans=(VersionSpan(version=self.chain[-1], start=0, end=3),),
            finish_reason="stop",
            latency_s=0.1,
        )
        await self.store.record_turn(turn, scope=scope)
        next_state = [{"role": "user", "content": "In Celsius, please."}]
        assert await self.store.set_next_state(turn.turn_id, next_state)

    async def train(self) -> None:
        while True:
            allowed = oldest_allowed(self.chain, FRESHNESS.max_staleness)
            await self.store.expire_stale(oldest_allowed=allowed)
            samples = await self.store.lease(
                owner="trainer", count=FRESHNESS.batch_size, ttl_s=60.0, share=Share()
            )
            if not samples:
                await asyncio.sleep(0.02)
                continue
            await asyncio.sleep(STEP_S)
            await self._step([sample.turn_id for sample in samples])

    async def _step(self, turn_ids: list[str]) -> None:
        number = len(self.chain)
        await self.store.commit_step(
            version=a_version(number, created_at=time.time()),
            results=[
                SampleResult(
                    turn_id=turn_id,
                    staleness=0,
                    advantage_mean=0.0,
                    advantage_abs_max=0.0,
                    advantages=np.zeros(3, dtype=np.float32),
                )
                for turn_id in turn_ids
            ],
        )
        self.chain.append(number)


def outcome(connection: Connection) -> Outcome:
    rows: Any = connection.execute(
        select(TurnRow.scope, TurnRow.state, TurnRow.drop_reason, VerdictRow.hint).outerjoin(
            VerdictRow, VerdictRow.turn_id == TurnRow.turn_id
        )
    )
    return Outcome(
        Counter((row.scope, row.hint is not None, row.drop_reason or row.state) for row in rows)
    )


async def overloaded(
    store: Store, judge_url: str, rendering: Rendering, freshness: Freshness | None
) -> tuple[Outcome, JudgeWorker, Outcome]:
    """After a time of three times as much as the judge can take, and after the quiet behind it."""
    loop = ClaimLoopConfig(concurrency=CONCURRENCY, poll_max_s=0.05)
    judge_config = JudgeConfig(base_url=judge_url, model="judge", votes=1, loop=loop)
    traffic = Traffic(store, rendering)
    await traffic.start()
    async with AsyncExitStack() as stack:
        teacher = await stack.enter_async_context(fault_teacher.served())
        client = await stack.enter_async_context(
            EngineClient(teacher.base_url, config=EngineClientConfig())
        )
        worker = JudgeWorker(store, judge_config, "judge", freshness=freshness)
        scoring = ScoringWorker(
            store, client, rendering, fault_teacher.config(), "scoring", freshness=freshness
        )
        await stack.enter_async_context(running(worker))
        await stack.enter_async_context(running(scoring))
        training = asyncio.create_task(traffic.train())
        try:
            await traffic.send(SECONDS, 3 * CAPACITY)
            during = await store.read(outcome)
            if freshness is not None:
                await until(lambda: quiet_use(store), timeout_s=60.0)
            return during, worker, await store.read(outcome)
        finally:
            training.cancel()
            await asyncio.gather(training, return_exceptions=True)


async def quiet_use(store: Store) -> bool:
    """Whether the judge has come back to turns that it had let go."""
    found = await store.read(outcome)
    return found.number("judging") <= CONCURRENCY and found.number("hint_only") > 2


async def test_under_three_times_the_capacity_hardly_a_lesson_expires(
    tmp_path: Path, judge_url: str, rendering: Rendering
) -> None:
    async with await Store.open(StoreConfig.sqlite(tmp_path / "records.db")) as store:
        during, worker, after = await overloaded(store, judge_url, rendering, FRESHNESS)
    print(f"\nnewest first: {shown(during)}")
    assert during.number("trained") >= 10
    assert during.expired <= 0.05
    assert during.number("over_capacity") > 0, "the rest is let go, not queued until it is stale"
    share = worker.metrics.registry.get_sample_value("judge_sampled_share")
    assert share is not None
    assert 0.2 < share < 0.9
    few, busy = during.judged_share("few"), during.judged_share("busy")
    assert few > 0.9 > busy, "who sends little is judged as before"
    assert after.number("hint_only", hinted=True) > 2
    assert after.number("stale", hinted=True) <= during.number("stale", hinted=True) + 2


async def test_oldest_first_most_lessons_expire(
    tmp_path: Path, judge_url: str, rendering: Rendering, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the order is for: the same traffic shows that the test above can fail."""
    oldest = (TurnRow.created_at.asc(), TurnRow.turn_id.asc())
    monkeypatch.setattr(waiting, "order_of", lambda _: oldest)
    async with await Store.open(StoreConfig.sqlite(tmp_path / "records.db")) as store:
        during, _, _ = await overloaded(store, judge_url, rendering, None)
    print(f"\noldest first: {shown(during)}")
    assert during.expired > 0.2


def shown(one: Outcome) -> str:
    numbers = {name: one.number(name) for name in ("trained", "stale", "over_capacity", "judging")}
    said = ", ".join(f"{number} {name}" for name, number in numbers.items())
    return f"{one.expired:.1%} of the accepted lessons expired ({said})"
