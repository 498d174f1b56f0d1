"""The scripted engine and the proxy in front of it, as processes of their own, for the proxy's
benchmarks. The proxy is the deployed one: it writes a real store and renders with the real
tokenizer.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import uvloop

from api_proxy.app import ProxyDeps, create_app
from api_proxy.config import ProxyConfig
from api_proxy.server.event_loop import run
from api_proxy.server.server import ProxyServer
from benchmarks.scripted_engine import Script
from benchmarks.scripted_engine import serve as serve_scripted
from opd.processes.supervisor import free_ports
from records.config import StoreConfig
from records.store import Store
from rollout_bridge.config import RendererConfig
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.rendering.rendering import Rendering

LAB_MODEL = Path(__file__).parents[1] / "examples" / "tool_lab" / "model"
MODEL_NAME = "policy"
SYSTEM = "You are a careful assistant. Use the tools where they help and answer in one sentence."
HEADERS = {"Content-Type": "application/json"}
START_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Where both processes are."""

    engine_url: str
    proxy_url: str
    engine_pid: int
    proxy_pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProxyPlan:
    """What the proxy's process needs."""

    model: str
    renderer: RendererConfig
    engine_url: str
    store: StoreConfig
    port: int
    settings: dict[str, Any]


@contextmanager
def served(
    script: Script,
    model: str,
    renderer: RendererConfig,
    store: StoreConfig | None = None,
    **settings: Any,
) -> Iterator[Served]:
    """Both processes, ready, until the end of the block; `settings` are the proxy's, `store` is
    its store (default: a new one). Raises RuntimeError if one is not ready in time.
    """
    engine_port, proxy_port = free_ports(2)
    engine_url, proxy_url = (f"http://127.0.0.1:{port}" for port in (engine_port, proxy_port))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        plan = _ProxyPlan(
            model=model,
            renderer=renderer,
            engine_url=engine_url,
            store=store or StoreConfig.sqlite(folder / "records.db"),
            port=proxy_port,
            settings=settings,
        )
        yield Served(
            engine_url=engine_url,
            proxy_url=proxy_url,
            engine_pid=_started(stack, run_engine, (script, engine_port), f"{engine_url}/health"),
            proxy_pid=_started(stack, _run_proxy, (plan,), f"{proxy_url}/readyz"),
        )


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of the values lie."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def cpu_s(pid: int) -> float:
    """Processor seconds of a process and its threads so far. Where there is one, that is Linux's
    clock of the process (clock_getcpuclockid(3)), in nanoseconds: ticks are hundredths of a second.
    """
    if sys.platform == "linux":
        return time.clock_gettime((~pid << 3) | 2)
    return sum(psutil.Process(pid).cpu_times()[:2])


def run_engine(script: Script, port: int) -> None:
    """Serve the scripted engine until the process ends."""
    uvloop.run(serve_scripted(script, "127.0.0.1", port))


def _run_proxy(plan: _ProxyPlan) -> None:
    run(_serve_proxy(plan))


async def _serve_proxy(plan: _ProxyPlan) -> None:
    """Serve until SIGTERM."""
    rendering = Rendering.load(plan.model, plan.renderer)
    async with (
        await Store.open(plan.store) as store,
        EngineClient(plan.engine_url, vocab_size=rendering.vocab_size) as engine,
    ):
        config = ProxyConfig(port=plan.port, model_name=MODEL_NAME, **plan.settings)
        app = create_app(ProxyDeps(store=store, engine=engine, rendering=rendering, config=config))
        await ProxyServer(app, config).serve()


def _started(
    stack: ExitStack, function: Callable[..., None], arguments: tuple[Any, ...], url: str
) -> int:
    """The id of a process that answers at `url`, and is stopped with the stack."""
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=function, args=arguments, daemon=True)
    process.start()
    stack.callback(_stop, process)
    uvloop.run(_wait_ready(url, process))
    assert process.pid is not None
    return process.pid


async def _wait_ready(url: str, process: SpawnProcess) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline and process.is_alive():
            try:
                async with session.get(url) as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)
    raise RuntimeError(f"{url} does not answer")


def _stop(process: SpawnProcess) -> None:
    process.terminate()
    process.join(10)
    if process.is_alive():
        process.kill()
        process.join()
