"""Proxies in front of a scripted engine, each a process of its own, and what a unit of their work
costs: for the benchmarks that compare them.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil
import uvloop

from benchmarks.proxy_processes import HEADERS, LAB_MODEL, SYSTEM, cpu_s, run_engine
from benchmarks.scripted_engine import Script
from opd.processes.supervisor import free_ports
from opd.run import config as run_config
from opd.run.config import RunConfig, merge
from opd.run.defaults import resolve, single_machine
from records.store import Store
from rollout_bridge.config import RendererConfig
from rollout_bridge.rendering.rendering import Rendering

ROOT = Path(__file__).parents[1]
MODEL = "policy"
RENDERER = {"name": "qwen3", "enable_thinking": False}
TURNS = 4
AT_ONCE = 8
REPLY_TOKENS = 16
"""Of a reply in a conversation."""
REST_S = 0.3
START_S = 120.0
KEYED = HEADERS | {"Authorization": "Bearer any"}
"""With a client's key, which no side checks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A proxy; `url` up to and including /v1."""

    name: str
    url: str
    pid: int


def start_proxy(stack: ExitStack, folder: Path, engine: str, port: int, workers: int = 1) -> int:
    """Start this proxy as `opd serve` does, with a new store in `folder`; returns its pid.

    `serve` makes the store before it starts the proxy, which so never loads what migrates one.
    """
    folder.mkdir()
    proxy = {"port": port, "workers": workers}
    own = {"renderer": RENDERER, "policy": {"url": engine}, "proxy": proxy}
    config = resolve(merge(single_machine(str(LAB_MODEL), folder), own), None, [])
    run_config.save(config, folder / "config.toml")
    asyncio.run(_make_store(config))
    return started(
        stack,
        [sys.executable, "-m", "opd.cli.app", "proxy", "--run", str(folder)],
        folder / "ours.log",
    )


async def _make_store(config: RunConfig) -> None:
    async with await Store.open(config.store):
        pass


def lab_rendering() -> Rendering:
    """Of the model that the engine pretends to serve."""
    return Rendering.load(str(LAB_MODEL), RendererConfig.model_validate(RENDERER))


def reply(rendering: Rendering, length: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Ids and their texts. Neighbours differ: LiteLLM ends a stream that repeats itself."""
    words = [
        rendering.tokenizer.encode(word, add_special_tokens=False)[0] for word in ("sun", "in")
    ]
    ids = tuple(words[place % 2] for place in range(length))
    return ids, tuple(rendering.decode([token]) for token in ids)


def start_engine(stack: ExitStack, rendering: Rendering, length: int) -> tuple[str, int]:
    """The address and pid of a scripted engine whose replies have so many tokens."""
    ids, texts = reply(rendering, length)
    script = Script(
        reply_ids=(*ids, rendering.stop_token_ids[0]), texts=texts, first_s=0.02, pace_s=0.005
    )
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    pid = forked(stack, run_engine, script, port)
    wait_for(f"{url}/health")
    return url, pid


async def cost_us(
    side: Side, number: int, do: Callable[[Side], Awaitable[None]], at_once: int = AT_ONCE
) -> float:
    """Microseconds of processor time for each of `number` units, so many at a time."""
    before = _cpu_s(side.pid)
    todo = iter(range(number))

    async def work() -> None:
        for _ in todo:
            await do(side)

    await asyncio.gather(*(work() for _ in range(at_once)))
    await asyncio.sleep(REST_S)  # what is done after an answer counts, too
    return 1e6 * (_cpu_s(side.pid) - before) / number


async def conversation(session: aiohttp.ClientSession, side: Side, number: int) -> None:
    """`TURNS` requests of one conversation. Raises RuntimeError for one that is not answered."""
    messages = [{"role": "system", "content": SYSTEM}]
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"Question {turn} of conversation {number}."})
        body = orjson.dumps({"model": MODEL, "messages": messages, "max_tokens": REPLY_TOKENS + 1})
        async with session.post(f"{side.url}/chat/completions", data=body, headers=KEYED) as reply:
            said = orjson.loads(await reply.read())
            if reply.status != 200:
                raise RuntimeError(f"{side.name}: {reply.status}: {said}")
        messages.append({"role": "assistant", "content": said["choices"][0]["message"]["content"]})


def _family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def _cpu_s(pid: int) -> float:
    return sum(cpu_s(one.pid) for one in _family(pid))


def memory_mib(pid: int) -> float:
    """Resident MiB."""
    return sum(one.memory_info().rss for one in _family(pid)) / 2**20


def forked(stack: ExitStack, function: Callable[..., None], *arguments: Any) -> int:
    """The pid of a new process that runs `function` until `stack` is closed."""
    process = multiprocessing.get_context("spawn").Process(
        target=function, args=arguments, daemon=True
    )
    process.start()
    stack.callback(process.join)
    stack.callback(process.terminate)
    assert process.pid is not None
    return process.pid


def started(stack: ExitStack, command: list[str], log: Path, **environment: str) -> int:
    """The pid of a command that runs until `stack` is closed."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, cwd=ROOT, env=os.environ | environment
        )
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return process.pid


def wait_for(url: str, log: Path | None = None) -> None:
    """Wait until `url` answers with 200. Raises RuntimeError if it does not within `START_S`."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            if uvloop.run(_is_there(url)):
                return
        except (aiohttp.ClientError, TimeoutError):
            pass
        time.sleep(0.2)
    said = "" if log is None else f": {log.read_text()[-500:]}"
    raise RuntimeError(f"{url} did not answer within {START_S:.0f} s{said}")


async def _is_there(url: str) -> bool:
    async with aiohttp.ClientSession() as session, session.get(url) as reply:
        return reply.status == 200
