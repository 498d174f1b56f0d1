"""An engine that scores as it is told, and turns that wait to be scored."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any
from uuid import uuid4

import numpy as np
from aiohttp import web

from records.names import TurnState, TurnType
from records.store import Store
from records.types import CapturedTurn, Verdict, VersionSpan, Vote
from rollout_bridge.config import ClaimLoopConfig, ScoringConfig
from rollout_bridge.engine.types import ROUTING_HEADER
from rollout_bridge.rendering.rendering import Rendering
from rollout_bridge.scoring.scoring import ScoringWorker
from tests.workers import run_until_left

HINT = "Give temperatures in Celsius."
RESPONSE = np.array([7, 8, 9], dtype=np.int32)
MESSAGES = [{"role": "system", "content": "rules"}, {"role": "user", "content": "Weather in Oslo?"}]


class FaultTeacher:
    """Answers like an engine, after `spoil` has had its way with the scored entries."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.routing_keys: list[str | None] = []
        self.in_flight: Counter[str | None] = Counter()
        self.most_in_flight = 0
        self.spoil: Callable[[list[Any]], list[Any]] = lambda entries: entries
        self.failure: web.Response | None = None
        self.version = "0"
        self.context_length = 4096
        self.top: Callable[[int], Any] = lambda position: [-0.5, -1.0]
        self.base_url = ""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        key = request.headers.get(ROUTING_HEADER)
        self.routing_keys.append(key)
        self.in_flight[key] += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight[key])
        await asyncio.sleep(0.01)
        self.in_flight[key] -= 1
        if self.failure is not None:
            return web.json_response(text=self.failure.text, status=self.failure.status)
        start = body["logprob_start_len"]
        ids = body["input_ids"][start:]
        entries = [
            [None if index == 0 else -0.25 * index, token, None] for index, token in enumerate(ids)
        ]
        meta = {"input_token_logprobs": self.spoil(entries)}
        if k := body.get("top_logprobs_num"):
            rows = [
                [[value, number, None] for number, value in enumerate(self.top(index)[:k])]
                for index in range(1, len(ids))
            ]
            meta["input_top_logprobs"] = [None, *rows]
        return web.json_response({"output_ids": [], "meta_info": meta})

    async def model_info(self, _request: web.Request) -> web.Response:
        return web.json_response(
            {
                "model_path": "m",
                "weight_version": self.version,
                "context_length": self.context_length,
            }
        )

    def fail(self, status: int, message: str) -> None:
        self.failure = web.json_response({"error": {"message": message}}, status=status)


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[FaultTeacher]:
    fault_teacher = FaultTeacher()
    app = web.Application()
    app.router.add_post("/generate", fault_teacher.generate)
    app.router.add_get("/model_info", fault_teacher.model_info)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    fault_teacher.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield fault_teacher
    await runner.cleanup()


async def scoring_turn(store: Store, rendering: Rendering, **options: Any) -> str:
    """A recorded turn with a verdict: it waits for the teacher."""
    session_id = await store.ensure_session(scope="s", external_id=options.pop("session", None))
    turn_id = uuid4().hex
    messages = options.pop("messages", MESSAGES)
    prompt_ids = options.pop("prompt_ids", rendering.prompt_ids(messages))
    hints = options.pop("hints", (HINT,))
    turn = CapturedTurn(
        turn_id=turn_id,
        session_id=session_id,
        parent_turn_id=None,
        turn_type=TurnType.MAIN,
        messages=messages,
        tools=[],
        response={"role": "assistant", "content": "50 F"},
        prompt_ids=prompt_ids,
        response_ids=options.pop("response_ids", RESPONSE),
        rollout_logprobs=np.full(3, -0.5, dtype=np.float32),
        token_parent_id=None,
        num_shared_ids=0,
        sampling={"temperature": 1.0, **options.pop("switches", {})},
        distribution_modified=None,
        version_spans=(VersionSpan(version=0, start=0, end=3),),
        finish_reason="stop",
        latency_s=0.1,
        **options,
    )
    await store.record_turn(turn, scope="s")
    await store.set_next_state(turn_id, [{"role": "user", "content": "In Celsius, please."}])
    (claimed,) = await store.claim(TurnState.JUDGING, owner="test", limit=1, ttl_s=60)
    vote = Vote(
        index=0,
        score=1,
        hint=HINT,
        text="",
        latency_s=0.1,
        prompt_tokens=None,
        completion_tokens=None,
    )
    verdict = Verdict(
        turn_id=claimed.turn_id,
        votes=(vote,),
        hint=hints[0],
        candidates=hints,
        selection="longest",
        judge="test",
    )
    assert await store.commit_verdict("test", verdict, None)
    return turn_id


def config(**options: Any) -> ScoringConfig:
    loop = {"pause_min_s": 0.02, "pause_max_s": 0.1, "poll_max_s": 0.05, "stop_grace_s": 1.0}
    loop |= {key[5:]: options.pop(key) for key in list(options) if key.startswith("loop_")}
    return ScoringConfig(loop=ClaimLoopConfig(**loop), **options)


async def run_until_left_scoring(store: Store, worker: ScoringWorker) -> None:
    await run_until_left(store, TurnState.SCORING, worker)


def change(position: int, **parts: Any) -> Callable[[list[Any]], list[Any]]:
    """Spoils one scored entry: its `logprob` or `token`."""

    def spoil(entries: list[Any]) -> list[Any]:
        logprob, token, text = entries[position]
        entries[position] = [parts.get("logprob", logprob), parts.get("token", token), text]
        return entries

    return spoil
