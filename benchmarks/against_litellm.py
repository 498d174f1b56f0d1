"""What a request and a streamed token cost this proxy, LiteLLM's and a bare pass-through.

    python -m benchmarks.against_litellm [--rounds 5] [--conversations 40] [--tokens 500]
    python -m benchmarks.against_litellm --workers 2

Each stands in front of the same scripted engine as a process of its own: this one as `opd proxy`
starts it, storing every turn; LiteLLM's with one worker and no database, in an environment of its
own (.venv-litellm, made at the first run); the pass-through is aiohttp and forwards bytes. They
take turns within each round, in random order. The figure is processor time, which does not depend
on what else runs: of the whole process, its children and threads included. Lower is better; ratios
are LiteLLM's figure over this one's, with the lowest and highest of the rounds.

With --workers, this proxy with so many workers is compared with itself with one, and nothing else
is started: processor time and requests per second, and how the requests were shared out. Each
worker gets as many conversations at a time as the one has alone: the more it answers at once, the
less a request costs, because commits are shared.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil
import uvloop
from aiohttp import web
from rich.progress import track

from benchmarks.proxy_processes import HEADERS, LAB_MODEL, SYSTEM
from benchmarks.scripted_engine import Script
from benchmarks.scripted_engine import serve as serve_scripted
from opd.processes.supervisor import free_ports
from opd.run import config as run_config
from opd.run.config import merge
from opd.run.defaults import resolve, single_machine
from rollout_bridge.config import RendererConfig
from rollout_bridge.rendering.rendering import Rendering

ROOT = Path(__file__).parents[1]
LITELLM = "litellm[proxy]==1.108.7"
OURS, THEIRS, BARE = "this proxy", "LiteLLM", "pass-through"
MODEL = "policy"
RENDERER = {"name": "qwen3", "enable_thinking": False}
TURNS = 4
AT_ONCE = 8
REPLY_TOKENS = 16
"""Of a reply in a conversation."""
START_S = 120.0
REST_S = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A proxy; `url` up to and including /v1."""

    name: str
    url: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Microseconds of processor time per unit, by side and round."""

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
    parser.add_argument("--workers", type=int, help="only compare so many workers with one")
    given = parser.parse_args()
    rendering = Rendering.load(str(LAB_MODEL), RendererConfig.model_validate(RENDERER))
    if given.workers is not None:
        print(_compared_workers(given, rendering))
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sides = {
            length: _sides(stack, folder / str(length), rendering, length)
            for length in (REPLY_TOKENS, given.tokens)
        }
        expected = "".join(reply(rendering, given.tokens)[1])
        figures = uvloop.run(_measure(sides, given, expected))
        memory = {side.name: _memory(side.pid) for side in sides[given.tokens]}
    print(table(figures, memory))


def _sides(
    stack: ExitStack, folder: Path, rendering: Rendering, length: int
) -> tuple[Side, Side, Side]:
    """All three in front of an engine whose replies have so many tokens."""
    ids, texts = reply(rendering, length)
    script = Script(
        reply_ids=(*ids, rendering.stop_token_ids[0]),
        texts=texts,
        first_s=0.02,
        pace_s=0.005,
    )
    engine_port, own_port, their_port, bare_port = free_ports(4)
    engine = f"http://127.0.0.1:{engine_port}"
    _forked(stack, _run_engine, script, engine_port)
    _wait_for(f"{engine}/health")
    ours = _own(stack, folder, engine, own_port)
    settings = folder / "litellm.yaml"
    settings.write_text(
        f"model_list:\n- model_name: {MODEL}\n  litellm_params:\n    model: openai/scripted\n"
        f"    api_base: {engine}/v1\n    api_key: none\n"
    )
    theirs = _started(
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
    bare = _forked(stack, _run_pass_through, engine, bare_port)
    urls = [f"http://127.0.0.1:{port}" for port in (own_port, their_port, bare_port)]
    paths = ("/readyz", "/health/readiness", "/health")
    logs = (folder / "ours.log", folder / "litellm.log", None)
    for url, path, log in zip(urls, paths, logs, strict=True):
        _wait_for(url + path, log)
    return (
        Side(name=OURS, url=f"{urls[0]}/v1", pid=ours),
        Side(name=THEIRS, url=f"{urls[1]}/v1", pid=theirs),
        Side(name=BARE, url=f"{urls[2]}/v1", pid=bare),
    )


def _own(stack: ExitStack, folder: Path, engine: str, port: int, workers: int = 1) -> int:
    """This proxy, with a new store."""
    folder.mkdir()
    proxy = {"port": port, "workers": workers}
    own = {"renderer": RENDERER, "policy": {"url": engine}, "proxy": proxy}
    config = resolve(merge(single_machine(str(LAB_MODEL), folder), own), None, [])
    run_config.save(config, folder / "config.toml")
    return _started(
        stack,
        [sys.executable, "-m", "opd.cli.app", "proxy", "--run", str(folder)],
        folder / "ours.log",
    )


def reply(rendering: Rendering, length: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Ids and their texts. Neighbours differ: LiteLLM ends a stream that repeats itself."""
    words = [
        rendering.tokenizer.encode(word, add_special_tokens=False)[0] for word in ("sun", "in")
    ]
    ids = tuple(words[place % 2] for place in range(length))
    return ids, tuple(rendering.decode([token]) for token in ids)


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
    sides: dict[int, tuple[Side, Side, Side]], given: argparse.Namespace, expected: str
) -> list[Figure]:
    chats = Figure(
        what=f"request, conversations of {TURNS} turns of {REPLY_TOKENS} tokens, not streamed",
        by_side={side.name: [] for side in sides[REPLY_TOKENS]},
    )
    streams = Figure(
        what=f"streamed token, replies of {given.tokens}",
        by_side={side.name: [] for side in sides[REPLY_TOKENS]},
    )
    numbers = itertools.count()  # no two conversations are alike
    timeout = aiohttp.ClientTimeout(total=None, sock_read=120)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def talk(side: Side) -> None:
            await _conversation(session, side, next(numbers))

        async def listen(side: Side) -> None:
            await _stream(session, side, next(numbers), given.tokens, expected)

        for side in (*sides[REPLY_TOKENS], *sides[given.tokens]):
            await talk(side)  # what only a process's first request does
        for _ in track(range(given.rounds), description="rounds"):
            for side in random.sample(sides[REPLY_TOKENS], 3):
                cost = await _cost(side, given.conversations, talk)
                chats.by_side[side.name].append(cost / TURNS)
            for side in random.sample(sides[given.tokens], 3):
                cost = await _cost(side, given.streams, listen)
                streams.by_side[side.name].append(cost / given.tokens)
    return [chats, streams]


def _compared_workers(given: argparse.Namespace, rendering: Rendering) -> str:
    """One worker and several, in front of one engine."""
    ids, texts = reply(rendering, REPLY_TOKENS)
    script = Script(
        reply_ids=(*ids, rendering.stop_token_ids[0]), texts=texts, first_s=0.02, pace_s=0.005
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine_port, *ports = free_ports(3)
        engine = f"http://127.0.0.1:{engine_port}"
        _forked(stack, _run_engine, script, engine_port)
        _wait_for(f"{engine}/health")
        sides = []
        for workers, port in zip((1, given.workers), ports, strict=True):
            of_side = folder / str(len(sides))
            pid = _own(stack, of_side, engine, port, workers)
            url = f"http://127.0.0.1:{port}"
            _wait_for(f"{url}/readyz", of_side / "ours.log")
            name = "1 worker" if workers == 1 else f"{workers} workers"
            sides.append(Side(name=name, url=f"{url}/v1", pid=pid))
        time.sleep(5)  # until all workers answer, and their metrics are there
        return uvloop.run(_measure_workers(sides, given))


async def _measure_workers(sides: list[Side], given: argparse.Namespace) -> str:
    costs: dict[str, list[float]] = {side.name: [] for side in sides}
    rates: dict[str, list[float]] = {side.name: [] for side in sides}
    numbers = itertools.count()
    async with aiohttp.ClientSession() as session:

        async def talk(side: Side) -> None:
            await _conversation(session, side, next(numbers))

        at_once = dict(
            zip((side.name for side in sides), (AT_ONCE, AT_ONCE * given.workers), strict=True)
        )
        for side in sides:
            await _cost(side, 4 * AT_ONCE, talk)  # what only first requests do
        for _ in track(range(given.rounds), description="rounds"):
            for side in random.sample(sides, len(sides)):
                began = time.perf_counter()
                cost = await _cost(side, given.conversations, talk, at_once[side.name])
                costs[side.name].append(cost / TURNS)
                took_s = time.perf_counter() - began - REST_S
                rates[side.name].append(given.conversations * TURNS / took_s)
        await asyncio.sleep(6)  # all workers have written their metrics
        async with session.get(sides[1].url.removesuffix("/v1") + "/metrics") as scraped:
            lines = (await scraped.text()).splitlines()
    one, several = (side.name for side in sides)
    shown = [f"{os.cpu_count()} cores", "", f"| | {one} | {several} | ratio |", "|---|---|---|---|"]
    for what, found, unit in (("CPU per request", costs, "us"), ("requests", rates, "/s")):
        ratios = [b / a for a, b in zip(found[one], found[several], strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        medians = " | ".join(f"{statistics.median(found[name]):.0f} {unit}" for name in found)
        shown.append(f"| {what} | {medians} | {spread} |")
    sizes = " | ".join(f"{_memory(side.pid):.0f} MiB" for side in sides)
    shown.append(f"| resident memory, all processes | {sizes} | |")
    of_workers = [line for line in lines if line.startswith('opd_requests_total{status="200"')]
    return "\n".join([*shown, "", *of_workers])


async def _cost(
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


async def _conversation(session: aiohttp.ClientSession, side: Side, number: int) -> None:
    messages = [{"role": "system", "content": SYSTEM}]
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"Question {turn} of conversation {number}."})
        body = orjson.dumps({"model": MODEL, "messages": messages, "max_tokens": REPLY_TOKENS + 1})
        async with session.post(
            f"{side.url}/chat/completions", data=body, headers=_HEADERS
        ) as reply:
            said = orjson.loads(await reply.read())
            if reply.status != 200:
                raise RuntimeError(f"{side.name}: {reply.status}: {said}")
        messages.append({"role": "assistant", "content": said["choices"][0]["message"]["content"]})


async def _stream(
    session: aiohttp.ClientSession, side: Side, number: int, tokens: int, expected: str
) -> None:
    messages = [{"role": "user", "content": f"Tell story {number}."}]
    body = {"model": MODEL, "messages": messages, "stream": True, "max_tokens": tokens + 1}
    text = ""
    async with session.post(
        f"{side.url}/chat/completions", data=orjson.dumps(body), headers=_HEADERS
    ) as reply:
        if reply.status != 200:
            raise RuntimeError(f"{side.name}: {reply.status}: {(await reply.text())[:300]}")
        async for line in reply.content:
            if line.startswith(b"data: {"):
                for choice in orjson.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content") or ""
    if text != expected:
        raise RuntimeError(f"{side.name}: a reply of {len(text)} characters, not {len(expected)}")


_HEADERS = HEADERS | {"Authorization": "Bearer any"}


def _family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def _cpu_s(pid: int) -> float:
    return sum(sum(one.cpu_times()[:2]) for one in _family(pid))


def _memory(pid: int) -> float:
    """Resident MiB."""
    return sum(one.memory_info().rss for one in _family(pid)) / 2**20


def _run_engine(script: Script, port: int) -> None:
    uvloop.run(serve_scripted(script, "127.0.0.1", port))


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


def _forked(stack: ExitStack, function: Callable[..., None], *arguments: Any) -> int:
    process = multiprocessing.get_context("spawn").Process(
        target=function, args=arguments, daemon=True
    )
    process.start()
    stack.callback(process.join)
    stack.callback(process.terminate)
    assert process.pid is not None
    return process.pid


def _started(stack: ExitStack, command: list[str], log: Path, **environment: str) -> int:
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, cwd=ROOT, env=os.environ | environment
        )
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return process.pid


def _wait_for(url: str, log: Path | None = None) -> None:
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
        ratios = [
            theirs / ours
            for ours, theirs in zip(figure.by_side[OURS], figure.by_side[THEIRS], strict=True)
        ]
        ratio = f"{statistics.median(ratios):.1f} ({min(ratios):.1f}-{max(ratios):.1f})"
        lines.append(f"| {figure.what} | {' | '.join(shown)} | {ratio} |")
    sizes = " | ".join(f"{memory[name]:.0f} MiB" for name in (OURS, THEIRS, BARE))
    lines.append(f"| resident memory | {sizes} | {memory[THEIRS] / memory[OURS]:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
