"""The proxy in front of a real engine: the lab's model in the embedded engine's own process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest
import uvicorn

from api_proxy.app import ProxyDeps, create_app
from api_proxy.config import ProxyConfig
from records.names import DropReason
from records.store import Store
from rollout_bridge.config import RendererConfig
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.config import EngineClientConfig
from rollout_bridge.engine.types import SamplingParams
from rollout_bridge.rendering.rendering import Rendering
from tests.api_proxy.conftest import WEATHER

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "tool_lab" / "model"
MESSAGES = [
    {"role": "system", "content": "You help with the weather."},
    {"role": "user", "content": "What is the weather in Paris?"},
]


@pytest.fixture(scope="module")
def lab_rendering() -> Rendering:
    return Rendering.load(str(MODEL), RendererConfig(name="qwen3"))


@pytest.fixture
async def client(lab_engine: str, lab_rendering: Rendering) -> AsyncIterator[EngineClient]:
    vocab_size = lab_rendering.vocab_size
    async with EngineClient(
        lab_engine, config=EngineClientConfig(), vocab_size=vocab_size
    ) as opened:
        yield opened


@pytest.fixture
async def base_url(
    client: EngineClient, store: Store, lab_rendering: Rendering
) -> AsyncIterator[str]:
    deps = ProxyDeps(store=store, engine=client, rendering=lab_rendering, config=ProxyConfig())
    config = uvicorn.Config(create_app(deps), port=0, log_level="warning")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    async with asyncio.timeout(30):
        while not server.started:
            await asyncio.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    await task


@pytest.fixture
async def lab_agent(base_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{base_url}/v1", api_key="key", max_retries=0, timeout=60
    ) as opened:
        yield opened


async def test_streamed_and_unstreamed_equal_the_engine(
    client: EngineClient, store: Store, lab_agent: openai.AsyncOpenAI
) -> None:
    fields = {
        "model": "policy",
        "messages": MESSAGES,
        "tools": [WEATHER],
        "temperature": 0,
        "max_tokens": 60,
    }
    whole = await lab_agent.chat.completions.create(**fields)
    async with lab_agent.chat.completions.stream(**fields) as stream:
        async for _ in stream:
            pass
        streamed = await stream.get_final_completion()
    first = await store.turn(whole.id.removeprefix("chatcmpl-"))
    second = await store.turn(streamed.id.removeprefix("chatcmpl-"))
    assert first is not None
    assert second is not None
    direct = await client.generate(
        first.prompt_ids,
        SamplingParams(temperature=0, max_new_tokens=60, stop_token_ids=(0, 2)),
    )
    assert first.response_ids.tolist() == direct.output_ids.tolist()
    assert second.response_ids.tolist() == direct.output_ids.tolist()
    assert (whole.choices[0].message.content or "") == (streamed.choices[0].message.content or "")
    assert [(span.version, span.start, span.end) for span in first.version_spans] == [
        (0, 0, len(first.response_ids))
    ]


async def test_two_turns_extend_each_other(store: Store, lab_agent: openai.AsyncOpenAI) -> None:
    reply = await lab_agent.chat.completions.create(
        model="policy", messages=MESSAGES, max_tokens=80
    )
    echo = reply.choices[0].message.model_dump(exclude_none=True)
    history = [*MESSAGES, echo, {"role": "user", "content": "Thanks."}]
    after = await lab_agent.chat.completions.create(model="policy", messages=history, max_tokens=40)
    first = await store.turn(reply.id.removeprefix("chatcmpl-"))
    second = await store.turn(after.id.removeprefix("chatcmpl-"))
    assert first is not None
    assert second is not None
    assert second.parent_turn_id == first.turn_id
    if first.drop_reason is None:
        assert first.next_state == [{"role": "user", "content": "Thanks."}]


async def test_a_pause_holds_requests(client: EngineClient, lab_agent: openai.AsyncOpenAI) -> None:
    await client.pause()
    request = asyncio.create_task(
        lab_agent.chat.completions.create(model="policy", messages=MESSAGES, max_tokens=5)
    )
    await asyncio.sleep(0.3)
    assert not request.done()
    await client.resume()
    assert (await request).choices[0].finish_reason in ("stop", "length")


async def test_a_reply_that_a_pause_aborts_is_continued(
    client: EngineClient, store: Store, lab_agent: openai.AsyncOpenAI
) -> None:
    """Replies are short, so the pause may come too late; it comes in time soon enough."""
    for _ in range(30):
        stream = await lab_agent.chat.completions.create(
            model="policy", messages=MESSAGES, stream=True, temperature=2, max_tokens=400
        )
        first = await anext(stream)
        await client.pause("abort")
        await client.resume()
        async for _chunk in stream:
            pass
        turn = await store.turn(first.id.removeprefix("chatcmpl-"))
        assert turn is not None
        assert turn.version_spans[-1].end == len(turn.response_ids)
        assert turn.drop_reason in (None, DropReason.LENGTH_CUT)
        if turn.sampling["num_continuations"]:
            return
    pytest.fail("no reply was aborted")


async def test_a_client_that_leaves_frees_the_engine(
    lab_engine: str, base_url: str, store: Store
) -> None:
    body = {
        "model": "policy",
        "messages": MESSAGES,
        "stream": True,
        "max_tokens": 1500,
        "temperature": 2,
        "stop": None,
    }
    async with httpx.AsyncClient(base_url=base_url) as http:
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            turn_id = response.headers["x-turn-id"]
            async for _ in response.aiter_bytes():
                break
        async with asyncio.timeout(10):
            while await store.turn(turn_id) is None:
                await asyncio.sleep(0.02)
    turn = await store.turn(turn_id)
    assert turn is not None
    # At temperature 2 the first token may end it, before anybody can leave.
    left_or_over = (DropReason.CLIENT_DISCONNECTED, DropReason.EMPTY_RESPONSE, None)
    assert turn.drop_reason in left_or_over
