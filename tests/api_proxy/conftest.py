"""The proxy over a real store, a real rendering and a scripted engine; in process and served."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from fastapi import FastAPI

from api_proxy.app import ProxyDeps, create_app
from api_proxy.config import ProxyConfig
from api_proxy.pages.measured import Curves
from records.store import Store
from records.types import TurnRecord
from rollout_bridge.config import RendererConfig
from rollout_bridge.engine.hold_file import HoldFile
from rollout_bridge.engine.types import PauseMode
from rollout_bridge.rendering.rendering import Rendering
from tests.api_proxy.scripted_engine import Line, ScriptedEngine
from tests.records.new_store import new_store
from tests.rollout_bridge.chat_tokenizers import write_tokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


class Clock:
    """Unix seconds that a test may move; each reading is a little later."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


@pytest.fixture(scope="session")
def rendering(tmp_path_factory: pytest.TempPathFactory) -> Rendering:
    folder = tmp_path_factory.mktemp("tokenizer")
    path = write_tokenizer(folder, "chat_template_thinking.jinja")
    return Rendering.load(path, RendererConfig(name="qwen3"))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(tmp_path: Path, clock: Clock) -> AsyncIterator[Store]:
    async with await Store.open(new_store(tmp_path / "records.db"), clock) as opened:
        yield opened


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@dataclass
class Door:
    """The proxy under test, and short ways to talk to it."""

    app: FastAPI
    client: httpx.AsyncClient
    store: Store
    engine: ScriptedEngine
    rendering: Rendering

    def line(self, text: str, *, end: bool = True, **options: Any) -> Line:
        """A scripted answer: `text` as ids, with the end token unless `end` is False."""
        ids = self.rendering.tokenizer.encode(text, add_special_tokens=False)
        if end:
            ids = [*ids, self.rendering.stop_token_ids[0]]
        return Line(ids=ids, **options)

    def will_say(self, *texts: str | Line | Exception) -> None:
        """Append answers to the engine's script."""
        for text in texts:
            self.engine.script.append(self.line(text) if isinstance(text, str) else text)

    async def post(
        self, messages: list[dict], headers: dict[str, str] | None = None, **fields: Any
    ) -> httpx.Response:
        """One request; the response whatever its status."""
        body = {"model": "policy", "messages": messages, **fields}
        return await self.client.post("/v1/chat/completions", json=body, headers=headers)

    async def say(
        self, messages: list[dict], headers: dict[str, str] | None = None, **fields: Any
    ) -> tuple[dict, TurnRecord]:
        """One request that succeeds: the assistant's message and the recorded turn."""
        response = await self.post(messages, headers, **fields)
        assert response.status_code == 200, response.text
        body = response.json()
        message = body["choices"][0]["message"]
        return message, await self.turn(body["id"].removeprefix("chatcmpl-"))

    async def turn(self, turn_id: str) -> TurnRecord:
        """A stored turn."""
        turn = await self.store.turn(turn_id)
        assert turn is not None
        return turn


@pytest.fixture
def settings() -> dict[str, Any]:
    """Proxy settings of the test; override in a module or with `parametrize`."""
    return {}


@pytest.fixture
def pause_mode() -> PauseMode:
    """How the engine's weights are changed; override like `settings`."""
    return "retract"


@asynccontextmanager
async def a_door(deps: ProxyDeps, engine: ScriptedEngine) -> AsyncIterator[Door]:
    """A proxy in this process."""
    app = create_app(deps)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client,
        app.router.lifespan_context(app),
    ):
        yield Door(
            app=app, client=client, store=deps.store, engine=engine, rendering=deps.rendering
        )


@pytest.fixture
def hold() -> HoldFile | None:
    """Where the trainer's schedule may hold generation."""
    return None


@pytest.fixture
def teacher() -> ScriptedEngine | None:
    """Who answers hinted prompts when a page asks."""
    return None


@pytest.fixture
def run_status() -> Callable[[], Awaitable[dict[str, Any]]] | None:
    """Reads how the whole run stands."""
    return None


@pytest.fixture
def curves() -> Curves | None:
    """Reads what the run measured step by step."""
    return None


@pytest.fixture
async def door(
    store: Store,
    engine: ScriptedEngine,
    rendering: Rendering,
    clock: Callable[[], float],
    settings: dict[str, Any],
    pause_mode: PauseMode,
    hold: HoldFile | None,
    teacher: ScriptedEngine | None,
    run_status: Callable[[], Awaitable[dict[str, Any]]] | None,
    curves: Curves | None,
) -> AsyncIterator[Door]:
    deps = ProxyDeps(
        store=store,
        engine=engine,
        rendering=rendering,
        config=ProxyConfig(**settings),
        clock=clock,
        pause_mode=pause_mode,
        hold=hold,
        teacher=teacher,
        run_status=run_status,
        curves=curves,
    )
    async with a_door(deps, engine) as door:
        yield door


@pytest.fixture
async def served(door: Door) -> AsyncIterator[str]:
    """The base URL of the proxy behind a real server."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        config = uvicorn.Config(door.app, log_level="warning", lifespan="off", http="httptools")
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        await task


@pytest.fixture
async def agent(served: str) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client."""
    async with openai.AsyncOpenAI(
        base_url=f"{served}/v1", api_key="key", max_retries=0, timeout=30
    ) as client:
        yield client
