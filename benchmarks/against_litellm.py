"""What a request and a streamed token cost this proxy, LiteLLM's and a bare pass-through.

    python -m benchmarks.against_litellm [--rounds 5] [--conversations 40] [--tokens 500]

Each stands in front of the same scripted engine as a process of its own: this one as `opd proxy`
starts it, storing every turn; LiteLLM's with one worker and no database, in an environment of its
own (.venv-litellm, made at the first run); the pass-through is aiohttp and forwards bytes. They
take turns within each round, in random order. The figure is processor time, which does not depend
on what else runs: of the whole process, its children and threads included. Lower is better; ratios
are LiteLLM's figure over this one's, with the lowest and highest of the rounds. Last comes what
each adds to the time of the first token, against the engine asked directly: that is time by the
clock, so the machine must be idle.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import aiohttp
import orjson
import uvloop
from aiohttp import web
from rich.progress import track

from benchmarks.proxy_latency import first_event_s, has_text
from benchmarks.proxy_processes import HEADERS, percentile
from benchmarks.proxy_sides import (
    KEYED,
    MODEL,
    REPLY_TOKENS,
    ROOT,
    TURNS,
    Side,
    conversation,
    cost_us,
    forked,
    lab_rendering,
    memory_mib,
    reply,
    start_engine,
    start_proxy,
    started,
    wait_for,
)
from opd.processes.supervisor import free_ports
from rollout_bridge.rendering.rendering import Rendering

LITELLM = "litellm[proxy]==1.108.7"
OURS, THEIRS, BARE, ENGINE = "this proxy", "LiteLLM", "pass-through", "engine"
LISTENERS, PAUSE_S = 64, 4.0
"""Sessions that wait for first tokens, and the mean pause of each between two requests: LiteLLM is
then busy for less than half of a core.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """All three in front of one engine."""

    engine: Side
    sides: tuple[Side, Side, Side]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Microseconds per unit, by side and round."""

    what: str
    by_side: dict[str, list[float]]


def main() -> None:
    """Measure, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--conversations", type=int, default=40, help="for a side and round")
    parser.add_argument("--tokens", type=int, default=500, help="of a streamed reply")
    parser.add_argument("--streams", type=int, default=16, help="for a side and round")
    parser.add_argument("--listen-s", type=float, default=15.0, help="for first tokens, a round")
    given = parser.parse_args()
    rendering = lab_rendering()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        short, long = (
            _setup(stack, folder / str(length), rendering, length)
            for length in (REPLY_TOKENS, given.tokens)
        )
        expected = "".join(reply(rendering, given.tokens)[1])
        figures = uvloop.run(_measure(short, long, given, expected))
        memory = {side.name: memory_mib(side.pid) for side in long.sides}
    print(table(figures, memory))


def _setup(stack: ExitStack, folder: Path, rendering: Rendering, length: int) -> Setup:
    """All three in front of an engine whose replies have so many tokens."""
    engine, engine_pid = start_engine(stack, rendering, length)
    own_port, their_port, bare_port = free_ports(3)
    ours = start_proxy(stack, folder, engine, own_port)
    settings = folder / "litellm.yaml"
    settings.write_text(
        f"model_list:\n- model_name: {MODEL}\n  litellm_params:\n    model: openai/scripted\n"
        f"    api_base: {engine}/v1\n    api_key: none\n"
    )
    theirs = started(
        stack,
        [
            *[str(litellm()), "--config", str(settings), "--num_workers", "1"],
            *["--host", "127.0.0.1", "--port", str(their_port)],
        ],
        folder / "litellm.log",
        # Their list of prices would be fetched from the internet.
        LITELLM_LOCAL_MODEL_COST_MAP="True",
        LITELLM_LOG="ERROR",
        # Neither side asks for a key.
        LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY="true",
    )
    bare = forked(stack, _run_pass_through, engine, bare_port)
    urls = [f"http://127.0.0.1:{port}" for port in (own_port, their_port, bare_port)]
    paths = ("/readyz", "/health/readiness", "/health")
    logs = (folder / "ours.log", folder / "litellm.log", None)
    for url, path, log in zip(urls, paths, logs, strict=True):
        wait_for(url + path, log)
    return Setup(
        engine=Side(name=ENGINE, url=f"{engine}/v1", pid=engine_pid),
        sides=(
            Side(name=OURS, url=f"{urls[0]}/v1", pid=ours),
            Side(name=THEIRS, url=f"{urls[1]}/v1", pid=theirs),
            Side(name=BARE, url=f"{urls[2]}/v1", pid=bare),
        ),
    )


def litellm() -> Path:
    """Its command, in an environment of its own."""
    folder = ROOT / ".venv-litellm"
    command = folder / "bin" / "litellm"
    if not command.exists():
        print(f"installing {LITELLM} in {folder}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(folder / "bin/pip"), "install", "--quiet", LITELLM], check=True)
    return command


def litellm_version() -> str:
    """The installed one."""
    shown = subprocess.run(
        [str(ROOT / ".venv-litellm/bin/pip"), "show", "litellm"],
        capture_output=True,
        text=True,
        check=True,
    )
    return next(
        line.partition(": ")[2] for line in shown.stdout.splitlines() if line.startswith("Version")
    )


async def _measure(
    short: Setup, long: Setup, given: argparse.Namespace, expected: str
) -> list[Figure]:
    chats, streams, halfway, tail = (
        Figure(what=what, by_side={side.name: [] for side in short.sides})
        for what in (
            f"request, conversations of {TURNS} turns of {REPLY_TOKENS} tokens, not streamed",
            f"streamed token, replies of {given.tokens}",
            f"added to the time of the first token, {LISTENERS} sessions, p50",
            "the same, p99",
        )
    )
    numbers = itertools.count()  # no two conversations are alike
    timeout = aiohttp.ClientTimeout(total=None, sock_read=120)
    connector = aiohttp.TCPConnector(limit=2 * LISTENERS)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def talk(side: Side) -> None:
            await conversation(session, side, next(numbers))

        async def listen(side: Side) -> None:
            await _stream(session, side, next(numbers), given.tokens, expected)

        for side in (*short.sides, *long.sides):
            await talk(side)  # what only a process's first request does
        for _ in track(range(given.rounds), description="rounds"):
            for side in random.sample(short.sides, 3):
                cost = await cost_us(side, given.conversations, talk)
                chats.by_side[side.name].append(cost / TURNS)
            for side in random.sample(long.sides, 3):
                cost = await cost_us(side, given.streams, listen)
                streams.by_side[side.name].append(cost / given.tokens)
            waits = {
                side.name: await _first_tokens_s(session, side, numbers, given.listen_s)
                for side in random.sample((short.engine, *short.sides), 4)
            }
            for figure, share in ((halfway, 0.5), (tail, 0.99)):
                direct_s = percentile(waits[ENGINE], share)
                for name, found in figure.by_side.items():
                    found.append(1e6 * (percentile(waits[name], share) - direct_s))
    return [chats, streams, halfway, tail]


async def _first_tokens_s(
    session: aiohttp.ClientSession, side: Side, numbers: Iterator[int], seconds: float
) -> list[float]:
    """The seconds to the first text of each streamed reply to `LISTENERS` sessions."""
    found: list[float] = []
    url = f"{side.url}/chat/completions"
    deadline = time.monotonic() + seconds

    async def ask() -> None:
        while (left_s := deadline - time.monotonic()) > 0:
            pause_s = random.uniform(0, 2 * PAUSE_S)
            await asyncio.sleep(min(pause_s, left_s))
            if pause_s > left_s:
                return
            messages = [{"role": "user", "content": f"Tell story {next(numbers)}."}]
            body = {"model": MODEL, "messages": messages, "stream": True}
            found.append(await first_event_s(session, url, body, has_text, KEYED))

    await asyncio.gather(*(ask() for _ in range(LISTENERS)))
    return found


async def _stream(
    session: aiohttp.ClientSession, side: Side, number: int, tokens: int, expected: str
) -> None:
    messages = [{"role": "user", "content": f"Tell story {number}."}]
    body = {"model": MODEL, "messages": messages, "stream": True, "max_tokens": tokens + 1}
    text = ""
    async with session.post(
        f"{side.url}/chat/completions", data=orjson.dumps(body), headers=KEYED
    ) as reply:
        if reply.status != 200:
            raise RuntimeError(f"{side.name}: {reply.status}: {(await reply.text())[:300]}")
        async for line in reply.content:
            if line.startswith(b"data: {"):
                for choice in orjson.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content") or ""
    if text != expected:
        raise RuntimeError(f"{side.name}: a reply of {len(text)} characters, not {len(expected)}")


def _run_pass_through(engine: str, port: int) -> None:
    uvloop.run(_pass_through(engine, port))


async def _pass_through(engine: str, port: int) -> None:
    async with aiohttp.ClientSession() as session:

        async def forward(request: web.Request) -> web.StreamResponse:
            body = await request.read()
            async with session.request(
                request.method, engine + request.path, data=body, headers=HEADERS
            ) as theirs:
                reply = web.StreamResponse(
                    status=theirs.status, headers={"Content-Type": theirs.content_type}
                )
                await reply.prepare(request)
                async for piece in theirs.content.iter_any():
                    await reply.write(piece)
                return reply

        app = web.Application(client_max_size=2**28)
        app.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.Event().wait()


def table(figures: Sequence[Figure], memory: dict[str, float]) -> str:
    """The figures in Markdown."""
    lines = [
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"LiteLLM {litellm_version()}, aiohttp {version('aiohttp')}",
        "",
        f"| | {OURS} | {THEIRS} | {BARE} | {THEIRS} / {OURS} |",
        "|---|---|---|---|---|",
    ]
    for figure in figures:
        shown = [
            f"{statistics.median(figure.by_side[name]):.0f} us" for name in (OURS, THEIRS, BARE)
        ]
        pairs = list(zip(figure.by_side[OURS], figure.by_side[THEIRS], strict=True))
        ratio = "unknown"  # lost in what differs from one request to the next
        if all(ours > 0 for ours, _ in pairs):
            ratios = [theirs / ours for ours, theirs in pairs]
            ratio = f"{statistics.median(ratios):.1f} ({min(ratios):.1f}-{max(ratios):.1f})"
        lines.append(f"| {figure.what} | {' | '.join(shown)} | {ratio} |")
    sizes = " | ".join(f"{memory[name]:.0f} MiB" for name in (OURS, THEIRS, BARE))
    lines.append(f"| resident memory | {sizes} | {memory[THEIRS] / memory[OURS]:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
