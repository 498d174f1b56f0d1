"""Tokens from the engine to the store and on to the teacher, through the real parts.

The embedded engine in its own process with the lab's model, the real proxy over a real store, the
official client as the agent. The witness of what was sampled is a tap on the engine's wire; the
witness of log-probs is a plain transformers forward pass.
"""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import uvicorn
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM

from api_proxy.app import ProxyDeps, create_app
from api_proxy.config import ProxyConfig
from examples.tool_lab.domain import SYSTEM_PROMPT, TOOLS
from records.config import StoreConfig
from records.names import TurnState
from records.store import Store
from records.types import TurnRecord, Verdict
from rollout_bridge.config import ClaimLoopConfig, ScoringConfig
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.rendering.rendering import Rendering
from rollout_bridge.scoring.hinting import hinted_messages
from rollout_bridge.scoring.scoring import ScoringWorker
from tests.integration.engine_tap import EngineTap
from tests.records.looking import list_turns

MODEL = str(Path(__file__).parents[2] / "examples" / "tool_lab" / "model")
HINT = "Give temperatures in Celsius."
USERS = [
    "What is the weather in Karo?",
    "Thank you. And in Milu?",
    "Find hotels in Karo, please.",
    "Bye.",
]
MAX_REQUESTS = 8
# Float32 sums in another order: batched decoding with a cache against one pass over everything.
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def forward():
    """Log-probs [T - start] of ids[start:], temperature 1, by one plain forward pass."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()

    def logprobs_of(ids: np.ndarray, start: int) -> np.ndarray:
        ids_1T = torch.as_tensor(np.asarray(ids, dtype=np.int64))[None]
        with torch.inference_mode():
            logprobs_TV = model(ids_1T).logits[0].log_softmax(-1)
        return logprobs_TV[start - 1 : -1].gather(1, ids_1T[0, start:, None])[:, 0].numpy()

    yield logprobs_of
    torch.set_num_threads(threads)


@dataclass
class Door:
    """A running proxy and what stands behind it."""

    store: Store
    engine: EngineClient
    tap: EngineTap
    client: AsyncOpenAI


@asynccontextmanager
async def door(lab_engine: str, rendering: Rendering, folder: Path) -> AsyncIterator[Door]:
    async with (
        await Store.open(StoreConfig.sqlite(folder / "records.db")) as store,
        EngineTap(lab_engine) as tap,
        EngineClient(tap.url, vocab_size=rendering.vocab_size) as engine,
    ):
        config = ProxyConfig(model_name="policy", max_output_tokens=96)
        app = create_app(ProxyDeps(store=store, engine=engine, rendering=rendering, config=config))
        # Connections wait in the listening socket until the server accepts them.
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        async with AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="key") as client:
            yield Door(store, engine, tap, client)
        server.should_exit = True
        await serving


async def ask(client: AsyncOpenAI, messages: list[dict[str, Any]], stream: bool) -> dict[str, Any]:
    """One request; the assistant message as an agent keeps it."""
    request: Any = {"model": "policy", "messages": messages, "tools": TOOLS, "temperature": 1.0}
    if not stream:
        reply = await client.chat.completions.create(**request)
        return reply.choices[0].message.model_dump(exclude_none=True)
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: dict[int, dict[str, Any]] = {}
    async for chunk in await client.chat.completions.create(**request, stream=True):
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            for part in choice.delta.tool_calls or ():
                call = calls.setdefault(
                    part.index,
                    {"id": "", "type": "function", "function": {"name": "", "arguments": ""}},
                )
                call["id"] += part.id or ""
                call["function"]["name"] += part.function.name or ""
                call["function"]["arguments"] += part.function.arguments or ""
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message


async def converse(client: AsyncOpenAI, stream: bool, salt: str) -> list[dict[str, Any]]:
    """A conversation with tool calls, of at most MAX_REQUESTS requests."""
    users = list(USERS)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": f"{SYSTEM_PROMPT} {salt}"},
        {"role": "user", "content": users.pop(0)},
    ]
    for _ in range(MAX_REQUESTS):
        reply = await ask(client, messages, stream)
        messages.append(reply)
        for call in reply.get("tool_calls", ()):
            result = '{"temp_c": 21, "temp_f": 70, "sky": "sun"}'
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if not reply.get("tool_calls"):
            if not users:
                break
            messages.append({"role": "user", "content": users.pop(0)})
    return messages


async def recorded_turns(store: Store) -> list[TurnRecord]:
    """All turns, oldest first."""
    newest_first = await list_turns(store, limit=1000)
    return await store.turns([turn.turn_id for turn in reversed(newest_first)])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_recorded_tokens_are_the_engines(lab_engine, rendering, forward, tmp_path, stream):
    async with door(lab_engine, rendering, tmp_path) as parts:
        conversations = [await converse(parts.client, stream, str(n)) for n in range(2)]
        turns = await recorded_turns(parts.store)
        exchanges = parts.tap.exchanges
    assert len(turns) == len(exchanges)
    assert any(turn.response.get("tool_calls") for turn in turns)
    for turn, exchange in zip(turns, exchanges, strict=True):
        assert exchange.request["stream"] is stream
        assert turn.prompt_ids.tolist() == exchange.input_ids
        assert turn.response_ids.tolist() == exchange.output_ids
        expected = np.asarray(exchange.output_logprobs, dtype=np.float32)
        assert turn.rollout_logprobs.tolist() == expected.tolist()
        assert [(s.version, s.start, s.end) for s in turn.version_spans] == [
            (0, 0, len(turn.response_ids))
        ]
        all_ids = np.concatenate([turn.prompt_ids, turn.response_ids])
        direct = forward(all_ids, len(turn.prompt_ids))
        np.testing.assert_allclose(turn.rollout_logprobs, direct, atol=TOLERANCE)
    for messages in conversations:
        check_conversation(rendering, turns, messages)


def check_conversation(
    rendering: Rendering, turns: list[TurnRecord], messages: list[dict[str, Any]]
) -> None:
    """Every reply of the conversation is a turn, whose prompt continues the one before."""
    of_this = [turn for turn in turns if turn.messages[0] == messages[0]]
    replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    assert len(of_this) == len(replies) >= len(USERS)
    assert len({turn.session_id for turn in of_this}) == 1
    for number, (turn, place) in enumerate(zip(of_this, replies, strict=True)):
        sent = messages[place]
        assert (turn.response.get("content") or "") == sent.get("content", "")
        assert turn.response.get("tool_calls") == sent.get("tool_calls")
        assert turn.prompt_ids.dtype == turn.response_ids.dtype == np.int32
        if number + 1 == len(replies):
            continue
        assert turn.next_state == messages[place + 1 : replies[number + 1]]
        later = of_this[number + 1]
        sampled = np.concatenate([turn.prompt_ids, turn.response_ids])
        if turn.finish_reason == "stop":
            assert later.prompt_ids[: len(sampled)].tolist() == sampled.tolist()
            assert later.parent_turn_id == turn.turn_id


async def test_a_teacher_scores_the_sampled_ids_under_the_hint(
    lab_engine, rendering, forward, tmp_path
):
    async with door(lab_engine, rendering, tmp_path) as parts:
        await converse(parts.client, stream=True, salt="x")
        claimed = await parts.store.claim(TurnState.JUDGING, owner="test", limit=100, ttl_s=60)
        assert len(claimed) >= 2
        for turn in claimed:
            verdict = Verdict(
                turn_id=turn.turn_id, votes=(), hint=HINT, selection="longest", judge="test"
            )
            assert await parts.store.commit_verdict("test", verdict, None)
        loop = ClaimLoopConfig(concurrency=4)
        worker = ScoringWorker(
            parts.store, parts.engine, rendering, ScoringConfig(loop=loop), "scorer"
        )
        stop = asyncio.Event()
        scoring = asyncio.create_task(worker.run(stop))
        async with asyncio.timeout(30):
            while (await parts.store.counts()).get(TurnState.READY, 0) < len(claimed):
                assert not scoring.done(), scoring
                await asyncio.sleep(0.02)
        stop.set()
        await scoring
        scores = {turn.turn_id: await parts.store.score_of(turn.turn_id) for turn in claimed}
        samples = await parts.store.lease(owner="trainer", count=len(claimed), ttl_s=60)
    assert {sample.turn_id for sample in samples} == set(scores)
    for turn in claimed:
        score = scores[turn.turn_id]
        assert score is not None
        check_hinted_prompt(rendering, turn, score.hinted_prompt_ids)
        all_ids = np.concatenate([score.hinted_prompt_ids, turn.response_ids])
        direct = forward(all_ids, len(score.hinted_prompt_ids))
        assert score.teacher_logprobs.shape == turn.response_ids.shape
        assert score.teacher_logprobs[0] == pytest.approx(direct[0], abs=TOLERANCE)
        assert score.teacher_logprobs[-1] == pytest.approx(direct[-1], abs=TOLERANCE)
        np.testing.assert_allclose(score.teacher_logprobs, direct, atol=TOLERANCE)


def check_hinted_prompt(rendering: Rendering, turn: TurnRecord, hinted_ids: np.ndarray) -> None:
    """The hinted prompt says what the stored one says, but for the last user message."""
    user = next(m for m in reversed(turn.messages) if m["role"] == "user")
    shown = hinted_messages([user], HINT)[0]["content"]
    before = rendering.decode(turn.prompt_ids)
    head, found, tail = before.rpartition(f"<|im_start|>user\n{user['content']}<|im_end|>")
    assert found
    assert rendering.decode(hinted_ids) == f"{head}<|im_start|>user\n{shown}<|im_end|>{tail}"
