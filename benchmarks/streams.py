"""The cost of many slow streams: errors, memory over time, and how late each token comes.

    python -m benchmarks.streams [--streams 256] [--seconds 300] [--pace-ms 1000] [--open-over 60]

Each agent keeps a stream open, with a scripted engine at one token per second; a stream that ends
is followed by the next of its conversation. They are opened evenly over the first minute; with
`--open-over 1` all at once, and again all at once when they end, which shows how long a burst of
requests waits for admission. Engine, proxy and agents are processes of their own.
The engine's schedule is known, so each piece of text has a due time: its token's place times the
pace after the first token was due. It prints the errors, the proxy's memory after the first minute
and at the end, what an open stream adds to it, and the delay of the pieces: p50 and p99 of the time
that they came later than due.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson
import psutil
import uvloop
from rich.progress import Progress

from benchmarks.proxy_processes import HEADERS, LAB_MODEL, MODEL_NAME, SYSTEM, percentile, served
from benchmarks.scripted_engine import Script
from rollout_bridge.config import RendererConfig
from rollout_bridge.rendering.rendering import Rendering

TOKENS = 120
"""Per reply: at one token per second a stream stays open for two minutes."""
SAMPLE_EVERY_S = 2.0
FIRST_S = 5.0
"""Of a stream before all others: what it loads is not theirs."""
SETTLED_S = 60.0
"""Memory is compared with what it was at this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Where the proxy is, and what the agents do."""

    proxy_url: str
    streams: int
    seconds: float
    first_s: float
    pace_s: float
    open_over_s: float


@dataclass(slots=True)
class Measured:
    """Delays of pieces in seconds, errors in words, memory as (age in seconds, bytes)."""

    delays_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    num_streams: int = 0


def reply_ids(rendering: Rendering) -> tuple[int, ...]:
    """Ids that are each a piece of text, so that every token shows at once, and the end token."""
    word = rendering.tokenizer.encode("sun", add_special_tokens=False)
    return (*(word * TOKENS)[:TOKENS], rendering.stop_token_ids[0])


async def one_stream(
    session: aiohttp.ClientSession, setup: Setup, messages: list[dict[str, Any]], deadline: float
) -> tuple[str, list[float]]:
    """A reply's text and the delay of each piece; ends early, without an error, at `deadline`."""
    body = {"model": MODEL_NAME, "messages": messages, "stream": True, "max_tokens": 2 * TOKENS}
    delays: list[float] = []
    text = ""
    start = time.monotonic()
    url = f"{setup.proxy_url}/v1/chat/completions"
    async with session.post(url, data=orjson.dumps(body), headers=HEADERS) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {(await response.text())[:200]}")
        async for line in response.content:
            if line.startswith(b"data: [DONE]"):
                return text, delays
            if time.monotonic() > deadline:
                return "", delays
            if not line.startswith(b"data: {"):
                continue
            event = orjson.loads(line[6:])
            if "error" in event:
                raise RuntimeError(str(event["error"]))
            piece = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            if piece:
                due = start + setup.first_s + len(delays) * setup.pace_s
                delays.append(time.monotonic() - due)
                text += piece
    raise RuntimeError("a stream ended without [DONE]")


async def agent(
    number: int, setup: Setup, session: aiohttp.ClientSession, measured: Measured, deadline: float
) -> None:
    """One stream after another until `deadline`."""
    await asyncio.sleep(random.Random(number).uniform(0, setup.open_over_s))
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    while time.monotonic() < deadline:
        messages.append({"role": "user", "content": f"Agent {number}: and then?"})
        try:
            text, delays = await one_stream(session, setup, messages, deadline)
        except (RuntimeError, aiohttp.ClientError, TimeoutError) as error:
            measured.errors.append(f"{type(error).__name__}: {error}")
            messages.pop()
            await asyncio.sleep(1.0)
            continue
        measured.num_streams += 1
        measured.delays_s += delays
        messages.append({"role": "assistant", "content": text})


async def watch_memory(pid: int, seconds: float, measured: Measured) -> None:
    """Record the proxy's resident memory at intervals, and show progress."""
    process = psutil.Process(pid)
    started = time.monotonic()
    with Progress() as progress:
        task = progress.add_task("streaming", total=seconds)
        while (age := time.monotonic() - started) < seconds:
            measured.memory.append((age, process.memory_info().rss))
            progress.update(task, completed=age)
            await asyncio.sleep(SAMPLE_EVERY_S)
        progress.update(task, completed=seconds)


async def measure(setup: Setup, proxy_pid: int) -> Measured:
    """All agents at once."""
    measured = Measured()
    timeout = aiohttp.ClientTimeout(total=None, sock_read=120)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        first: list[dict[str, Any]] = [
            {"role": "user", "content": "What does a first request load?"}
        ]
        await one_stream(session, setup, first, time.monotonic() + FIRST_S)
        deadline = time.monotonic() + setup.seconds
        await asyncio.gather(
            watch_memory(proxy_pid, setup.seconds, measured),
            *(agent(number, setup, session, measured, deadline) for number in range(setup.streams)),
        )
    return measured


def report(setup: Setup, measured: Measured) -> str:
    """The figures as text."""
    lines = [f"{setup.streams} streams for {setup.seconds:.0f} s: {len(measured.errors)} errors"]
    lines += [f"  {error}" for error in dict.fromkeys(measured.errors)]
    delays = measured.delays_s
    lines.append(
        f"{len(delays)} pieces of text, later than due: p50 {1000 * statistics.median(delays):.0f} "
        f"ms, p99 {1000 * percentile(delays, 0.99):.0f} ms, most {1000 * max(delays):.0f} ms"
    )
    settled_s = min(SETTLED_S, setup.seconds / 2)
    settled = next(size for age, size in measured.memory if age >= settled_s)
    last = measured.memory[-1][1]
    lines.append(
        f"memory of the proxy: {settled / 2**20:.0f} MiB after {settled_s:.0f} s, "
        f"{last / 2**20:.0f} MiB at the end ({last / settled - 1:+.1%})"
    )
    each = (settled - measured.memory[0][1]) / setup.streams / 2**10
    lines.append(f"an open stream: {each:.0f} KiB more than before them")
    return "\n".join(lines)


def run(options: argparse.Namespace) -> str:
    """Start the processes, measure, stop them."""
    renderer = RendererConfig(name="qwen3", enable_thinking=False)
    rendering = Rendering.load(str(LAB_MODEL), renderer)
    pace_s = options.pace_ms / 1000
    script = Script(reply_ids=reply_ids(rendering), first_s=pace_s, pace_s=pace_s)
    with served(script, str(LAB_MODEL), renderer) as where:
        setup = Setup(
            proxy_url=where.proxy_url,
            streams=options.streams,
            seconds=options.seconds,
            first_s=pace_s,
            pace_s=pace_s,
            open_over_s=min(options.open_over, options.seconds / 2),
        )
        return report(setup, uvloop.run(measure(setup, where.proxy_pid)))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="What many slow streams cost the proxy.")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--pace-ms", type=float, default=1000.0, help="engine's time per token")
    parser.add_argument("--open-over", type=float, default=60.0, help="seconds until all are open")
    print(run(parser.parse_args()))


if __name__ == "__main__":
    main()
