"""The endpoint as a process of its own gets SIGTERM in the middle of a stream."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import openai
import pytest
from aiohttp import web

from benchmarks.scripted_engine import Script, ScriptedEngine
from opd.run import config as run_config
from opd.run.config import RunConfig, merge
from opd.run.defaults import resolve, single_machine
from records.names import TurnState
from records.store import Store
from rollout_bridge.config import RendererConfig
from rollout_bridge.rendering.rendering import Rendering
from tests.records.looking import list_turns
from tests.reliability.lab import MODEL

ROOT = Path(__file__).parents[2]
RENDERER = {"name": "qwen3", "enable_thinking": False}
REPLY = "sun and rain " * 10 + "sun"
REPLY_S = 3.0
HI = [{"role": "user", "content": "hi"}]


@contextlib.asynccontextmanager
async def scripted_engine(reply_s: float = REPLY_S) -> AsyncIterator[str]:
    """The address of an engine that takes so long for a reply."""
    rendering = Rendering.load(str(MODEL), RendererConfig.model_validate(RENDERER))
    words = rendering.tokenizer.encode(REPLY, add_special_tokens=False)
    ids = (*words, rendering.stop_token_ids[0])
    engine = ScriptedEngine(Script(reply_ids=ids, first_s=0.05, pace_s=reply_s / len(ids)))
    runner = web.AppRunner(engine.app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def configured(folder: Path, engine_url: str) -> RunConfig:
    own = {"renderer": RENDERER, "policy": {"url": engine_url}, "proxy": {"port": 0}}
    config = resolve(merge(single_machine(str(MODEL), folder), own), None, [])
    run_config.save(config, folder / "config.toml")
    return config


@contextlib.asynccontextmanager
async def proxy_process(folder: Path, url: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """It runs and is ready."""
    command = [
        sys.executable,
        "-m",
        "opd.cli.app",
        "proxy",
        "--config",
        str(folder / "config.toml"),
    ]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT)
    try:
        async with aiohttp.ClientSession() as http, asyncio.timeout(60):
            while not await is_ready(http, url):
                assert process.returncode is None, "the proxy ended while starting"
                await asyncio.sleep(0.1)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def is_ready(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(f"{url}/readyz") as response:
            return response.status == 200
    except aiohttp.ClientConnectionError:
        return False


async def test_a_proxy_that_gets_sigterm_ends_its_stream_refuses_new_requests_and_exits_with_0(
    tmp_path: Path,
) -> None:
    async with scripted_engine() as engine_url:
        config = configured(tmp_path, engine_url)
        url = f"http://{config.proxy.host}:{config.proxy.port}"
        async with (
            proxy_process(tmp_path, url) as process,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client,
        ):
            stream = await client.chat.completions.create(
                model=config.proxy.model_name, messages=HI, stream=True
            )
            pieces: list[str] = []
            async for chunk in stream:
                pieces.append(chunk.choices[0].delta.content or "")
                if len(pieces) == 3:
                    process.send_signal(signal.SIGTERM)
                    await asyncio.sleep(0.2)
                    with pytest.raises(openai.InternalServerError) as refused:
                        await client.chat.completions.create(
                            model=config.proxy.model_name, messages=HI
                        )
            assert refused.value.status_code == 503
            assert refused.value.code == "shutting_down"
            assert "".join(pieces) == REPLY
            assert await asyncio.wait_for(process.wait(), 30) == 0
    async with await Store.open(config.store) as store:
        [turn] = await list_turns(store)
        assert turn.state is TurnState.AWAITING_NEXT_STATE
