"""The routing key through SGLang's own router: a session stays on one server.

Needs sglang-router in this environment (slime's has it). Two embedded engines stand behind it; the
weight version that each reports says which of them answered.
"""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.errors import EngineError
from rollout_bridge.engine.types import ROUTING_HEADER, SamplingParams
from tests.contract.engine_process import ROOT, embedded_engine

if importlib.util.find_spec("sglang_router") is None:
    pytest.skip("sglang-router is not installed in this environment", allow_module_level=True)

LAB_MODEL = ROOT / "examples" / "tool_lab" / "model"
ONE_TOKEN = SamplingParams(max_new_tokens=1)
SESSIONS = [f"session-{number}" for number in range(12)]


@pytest.fixture(scope="module")
def router_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with (
        embedded_engine(LAB_MODEL, "--weight-version", "0") as one,
        embedded_engine(LAB_MODEL, "--weight-version", "1") as other,
    ):
        port, metrics_port = _free_ports()
        command = [sys.executable, "-m", "sglang_router.launch_router", "--policy", "manual"]
        command += ["--worker-urls", one, other, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--prometheus-port", str(metrics_port)]
        log = tmp_path_factory.mktemp("router") / "log"
        with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
            try:
                asyncio.run(_until_it_answers(f"http://127.0.0.1:{port}", process, log))
                yield f"http://127.0.0.1:{port}"
            finally:
                process.terminate()


def _free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


async def _until_it_answers(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    async with EngineClient(url) as client, asyncio.timeout(180):
        while True:
            assert process.poll() is None, log.read_text()
            try:
                await client.generate([5], ONE_TOKEN)
            except EngineError:
                await asyncio.sleep(0.2)
            else:
                return


async def test_a_session_stays_on_one_server(router_url: str) -> None:
    async with EngineClient(router_url) as client, aiohttp.ClientSession() as http:

        async def chat(key: str) -> str:
            body = {"model": str(LAB_MODEL), "messages": [{"role": "user", "content": "hi"}]}
            url = f"{router_url}/v1/chat/completions"
            headers = {ROUTING_HEADER: key}
            async with http.post(url, json={**body, "max_tokens": 1}, headers=headers) as reply:
                return (await reply.json())["metadata"]["weight_version"]

        async def streamed(key: str) -> str | None:
            final = None
            async for chunk in client.stream([9, 10], ONE_TOKEN, routing_key=key):
                final = chunk.final
            assert final is not None
            return final.weight_version

        servers = {}
        for key in SESSIONS:
            seen = set()
            for number in range(3):
                prompt = [20 + number] * 20
                seen.add((await client.generate(prompt, ONE_TOKEN, routing_key=key)).weight_version)
                seen.add(await streamed(key))
                seen.add(await chat(key))
            assert len(seen) == 1
            servers[key] = seen.pop()
    assert set(servers.values()) == {"0", "1"}
