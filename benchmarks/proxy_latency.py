"""How much later a streamed turn starts through the proxy than at the engine.

    python -m benchmarks.proxy_latency [--seconds 60] [--agents 16] [--model PATH]

16 agents have conversations at the same time. Each turn is sent twice, in random order: directly to
the scripted engine, as the prompt's ids, and to the proxy, as messages. Agents start staggered and
pause between turns, so that the machine is less than half busy: this measures the way through the
proxy, not a queue before it. Engine, proxy and agents are processes of their own. The time is from
sending the request to the first token (at the engine) or the first text (at the proxy); the figure
is the difference of the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson
import psutil
import uvloop

from benchmarks.proxy_processes import (
    HEADERS,
    LAB_MODEL,
    MODEL_NAME,
    SYSTEM,
    cpu_s,
    percentile,
    served,
)
from benchmarks.scripted_engine import Script
from rollout_bridge.config import RendererConfig
from rollout_bridge.rendering.rendering import Rendering

REPLY = "It is 21 degrees and sunny in Paris today, with a light wind from the west."
QUESTION = "What is the weather like in Paris on day {}, and should I take an umbrella with me?"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Looks up the {name.split('_')[1]} of a city for a given day.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "day": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
    for name in ("get_weather", "find_hotels", "list_events", "get_traffic")
]
TURNS_PER_CONVERSATION = 8
BUSY_LIMIT = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Where everything is and how long it runs."""

    engine_url: str
    proxy_url: str
    agents: int
    seconds: float
    pause_s: float


@dataclass(slots=True)
class Measured:
    """Times to the first token in seconds."""

    direct_s: list[float] = field(default_factory=list)
    proxied_s: list[float] = field(default_factory=list)


async def first_event_s(
    session: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    is_first: Any,
    headers: dict[str, str] = HEADERS,
) -> float:
    """Seconds until the first event that `is_first` accepts; the reply is read to its end."""
    first: float | None = None
    start = time.perf_counter()
    async with session.post(url, data=orjson.dumps(body), headers=headers) as response:
        if response.status != 200:
            raise RuntimeError(f"{url} answered {response.status}: {await response.text()}")
        async for line in response.content:
            if first is None and line.startswith(b"data: {") and is_first(orjson.loads(line[6:])):
                first = time.perf_counter() - start
    if first is None:
        raise RuntimeError(f"{url}: the reply had no token")
    return first


def has_text(event: dict[str, Any]) -> bool:
    """Whether an event of a streamed chat completion has text."""
    return any(choice["delta"].get("content") for choice in event.get("choices", ()))


def _has_token(event: dict[str, Any]) -> bool:
    return bool(event["output_ids"])


async def agent(
    number: int,
    setup: Setup,
    rendering: Rendering,
    session: aiohttp.ClientSession,
    measured: Measured,
    deadline: float,
) -> None:
    """One agent: conversations of several turns, each turn sent both ways, until `deadline`."""
    randomness = random.Random(number)
    await asyncio.sleep(randomness.uniform(0, 2 * setup.pause_s))
    day = number * 1000
    while time.monotonic() < deadline:
        messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
        for _ in range(TURNS_PER_CONVERSATION):
            day += 1
            messages.append({"role": "user", "content": QUESTION.format(day)})
            ids = rendering.prompt_ids(messages, TOOLS).tolist()
            direct = {"input_ids": ids, "sampling_params": {}, "stream": True}
            chat = {"model": MODEL_NAME, "messages": messages, "tools": TOOLS, "stream": True}
            for is_proxied in randomness.sample([False, True], 2):
                if is_proxied:
                    url, body, is_first = f"{setup.proxy_url}/v1/chat/completions", chat, has_text
                else:
                    url, body, is_first = f"{setup.engine_url}/generate", direct, _has_token
                seconds = await first_event_s(session, url, body, is_first)
                (measured.proxied_s if is_proxied else measured.direct_s).append(seconds)
                await asyncio.sleep(randomness.uniform(0, 2 * setup.pause_s))
            messages.append({"role": "assistant", "content": REPLY})
            if time.monotonic() >= deadline:
                return


async def run_agents(setup: Setup, rendering: Rendering, seconds: float) -> Measured:
    """All agents at once for `seconds`."""
    measured = Measured()
    deadline = time.monotonic() + seconds
    async with AsyncExitStack() as stack:
        connector = aiohttp.TCPConnector(limit=4 * setup.agents)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        await asyncio.gather(
            *(
                agent(number, setup, rendering, session, measured, deadline)
                for number in range(setup.agents)
            )
        )
    return measured


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuShare:
    """Share of all cores: of each process, and of the whole machine (other programs included)."""

    processes: dict[str, float]
    machine: float


class CpuMeter:
    """Measures from its creation to `read`."""

    def __init__(self, pids: dict[str, int | None]) -> None:
        self._pids = {name: os.getpid() if pid is None else pid for name, pid in pids.items()}
        self._start = time.monotonic()
        self._before = {name: cpu_s(pid) for name, pid in self._pids.items()}
        psutil.cpu_percent()

    def read(self) -> CpuShare:
        """The shares since the start."""
        total_s = (time.monotonic() - self._start) * (psutil.cpu_count() or 1)
        used = {
            name: (cpu_s(pid) - self._before[name]) / total_s for name, pid in self._pids.items()
        }
        return CpuShare(processes=used, machine=psutil.cpu_percent() / 100)


def report(measured: Measured, cpu: CpuShare) -> str:
    """The figures as text."""
    lines = [f"{'first token after':20} {'turns':>6} {'p50 ms':>8} {'p95 ms':>8}"]
    for name, values in (("engine", measured.direct_s), ("proxy", measured.proxied_s)):
        p50, p95 = 1000 * statistics.median(values), 1000 * percentile(values, 0.95)
        lines.append(f"{name:20} {len(values):6d} {p50:8.2f} {p95:8.2f}")
    later = 1000 * (statistics.median(measured.proxied_s) - statistics.median(measured.direct_s))
    tail = 1000 * (percentile(measured.proxied_s, 0.95) - percentile(measured.direct_s, 0.95))
    lines.append(f"{'proxy - engine':20} {'':6} {later:8.2f} {tail:8.2f}")
    shares = ", ".join(f"{name} {share:.0%}" for name, share in cpu.processes.items())
    own = sum(cpu.processes.values())
    lines.append(f"CPU: {own:.0%} of all cores ({shares}); whole machine {cpu.machine:.0%}")
    if max(own, cpu.machine) > BUSY_LIMIT:
        lines.append("the machine was more than half busy: this also measures queues")
    return "\n".join(lines)


async def measure(setup: Setup, rendering: Rendering, pids: dict[str, int | None]) -> str:
    """Warm up, then measure."""
    await run_agents(setup, rendering, min(5.0, setup.seconds))
    meter = CpuMeter(pids)
    measured = await run_agents(setup, rendering, setup.seconds)
    shares = meter.read()
    return f"{report(measured, shares)}\n{await proxy_counters(setup.proxy_url)}"


async def proxy_counters(proxy_url: str) -> str:
    """The proxy's counters since its start: they show that turns were recorded and extended."""
    async with aiohttp.ClientSession() as session, session.get(f"{proxy_url}/metrics") as response:
        lines = (await response.text()).splitlines()
    wanted = ("opd_turns_total", "opd_bridge_total", "opd_store_failed_turns_total")
    return "proxy: " + ", ".join(line for line in lines if line.startswith(wanted))


def run(options: argparse.Namespace) -> str:
    """Start the processes, measure, stop them."""
    renderer = RendererConfig(name=options.renderer, enable_thinking=False)
    rendering = Rendering.load(options.model, renderer)
    reply_ids = rendering.tokenizer.encode(REPLY, add_special_tokens=False)
    script = Script(
        reply_ids=(*reply_ids, rendering.stop_token_ids[0]),
        first_s=options.first_ms / 1000,
        pace_s=options.pace_ms / 1000,
    )
    with served(script, options.model, renderer) as where:
        setup = Setup(
            engine_url=where.engine_url,
            proxy_url=where.proxy_url,
            agents=options.agents,
            seconds=options.seconds,
            pause_s=options.pause_ms / 1000,
        )
        pids = {"engine": where.engine_pid, "proxy": where.proxy_pid, "agents": None}
        return uvloop.run(measure(setup, rendering, pids))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--agents", type=int, default=16)
    parser.add_argument("--model", default=str(LAB_MODEL), help="whose tokenizer to render with")
    parser.add_argument("--renderer", default="qwen3")
    parser.add_argument("--first-ms", type=float, default=40.0, help="engine's time to first token")
    parser.add_argument("--pace-ms", type=float, default=15.0, help="engine's time between tokens")
    parser.add_argument("--pause-ms", type=float, default=300.0, help="mean pause between turns")
    print(run(parser.parse_args()))


if __name__ == "__main__":
    main()
