"""How much later a tenant is answered while another one requests all capacity.

    python -m benchmarks.tenant_fairness [--seconds 30] [--places 32] [--reserved-share 0.125]

One tenant asks a short question again and again: first alone, then while another tenant keeps three
times as many long replies requested as there are places. It measures the first tenant's time to the
first token. Its p99 under load may be at most three times the idle one; otherwise the exit status
is 1. Engine, proxy and agents are processes of their own; the engine is scripted.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
import psutil
import uvloop

from benchmarks.proxy_processes import HEADERS, LAB_MODEL, MODEL_NAME, SYSTEM, percentile, served
from benchmarks.scripted_engine import Script
from rollout_bridge.config import RendererConfig
from rollout_bridge.rendering.rendering import Rendering

MAX_RATIO = 3.0
TOKENS = 150
SHORT = 4
"""Tokens of the modest tenant's replies."""
PACE_S = 0.04
FIRST_S = 0.04
"""A reply occupies its place for six seconds."""
PAUSE_S = 0.05
LOAD_FACTOR = 3
SETTLE_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Who asks, where, over which connections."""

    key: str
    url: str
    session: aiohttp.ClientSession

    async def first_token_s(self, question: str, max_tokens: int) -> float | None:
        """Seconds until the first text; None if the request was refused."""
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        body: dict[str, Any] = {"model": MODEL_NAME, "messages": messages, "stream": True}
        body["max_tokens"] = max_tokens
        headers = {**HEADERS, "Authorization": f"Bearer {self.key}"}
        begun = time.perf_counter()
        first = None
        async with self.session.post(
            f"{self.url}/v1/chat/completions", data=orjson.dumps(body), headers=headers
        ) as response:
            if response.status == 429:
                await asyncio.sleep(0.5)
                return None
            response.raise_for_status()
            async for line in response.content:
                if first is None and line.startswith(b"data: {") and b'"content":"s' in line:
                    first = time.perf_counter() - begun
        return first


async def asks_in_turn(tenant: Tenant, seconds: float) -> list[float]:
    """The modest tenant: one question after another."""
    found: list[float] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        first_s = await tenant.first_token_s(f"Question {len(found)}?", SHORT)
        assert first_s is not None
        found.append(first_s)
        await asyncio.sleep(PAUSE_S)
    return found


async def asks_for_ever(tenant: Tenant, number: int) -> None:
    """One of the greedy tenant's agents."""
    count = 0
    while True:
        count += 1
        await tenant.first_token_s(f"Agent {number}, question {count}?", TOKENS)


async def measure(url: str, places: int, seconds: float) -> tuple[list[float], list[float]]:
    """The modest tenant's times: alone, and under load."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        modest = Tenant(key="modest", url=url, session=session)
        greedy = Tenant(key="greedy", url=url, session=session)
        await asks_in_turn(modest, min(3.0, seconds))
        idle = await asks_in_turn(modest, seconds)
        agents = [
            asyncio.create_task(asks_for_ever(greedy, number))
            for number in range(LOAD_FACTOR * places)
        ]
        await asyncio.sleep(SETTLE_S)
        loaded = await asks_in_turn(modest, seconds)
        for agent in agents:
            agent.cancel()
        for ended in await asyncio.gather(*agents, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended
    return idle, loaded


def run(options: argparse.Namespace) -> bool:
    """Print the figures; returns whether the ratio is small enough."""
    renderer = RendererConfig(name="qwen3", enable_thinking=False)
    rendering = Rendering.load(str(LAB_MODEL), renderer)
    word = rendering.tokenizer.encode("sun", add_special_tokens=False)
    ids = ((word * TOKENS)[:TOKENS], [rendering.stop_token_ids[0]])
    script = Script(reply_ids=(*ids[0], *ids[1]), first_s=FIRST_S, pace_s=PACE_S)
    settings = {"max_running": options.places, "reserved_share": options.reserved_share}
    with served(script, str(LAB_MODEL), renderer, **settings) as where:
        psutil.cpu_percent()
        idle, loaded = uvloop.run(measure(where.proxy_url, options.places, options.seconds))
        busy = psutil.cpu_percent()
    for name, values in (("alone", idle), ("under load", loaded)):
        p50, p99 = (1000 * percentile(values, share) for share in (0.5, 0.99))
        print(f"{name:16} {len(values):5d} questions  p50 {p50:8.1f} ms  p99 {p99:8.1f} ms")
    ratio = percentile(loaded, 0.99) / percentile(idle, 0.99)
    verdict = "within" if ratio <= MAX_RATIO else "beyond"
    print(f"p99 ratio {ratio:.2f}, {verdict} {MAX_RATIO:g}; the machine was {busy:.0f}% busy")
    return ratio <= MAX_RATIO


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--places", type=int, default=32)
    parser.add_argument("--reserved-share", type=float, default=0.125)
    sys.exit(0 if run(parser.parse_args()) else 1)


if __name__ == "__main__":
    main()
