"""What this proxy costs with several workers, against itself with one.

    python -m benchmarks.proxy_workers --workers 2 [--rounds 5] [--conversations 40]

Processor time of all its processes and requests per second, and how the requests were shared out.
Each worker gets as many conversations at a time as the one has alone: the more it answers at once,
the less a request costs, because commits are shared.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import uvloop
from rich.progress import track

from benchmarks.proxy_sides import (
    AT_ONCE,
    REPLY_TOKENS,
    REST_S,
    TURNS,
    Side,
    conversation,
    cost_us,
    lab_rendering,
    memory_mib,
    start_engine,
    start_proxy,
    wait_for,
)
from opd.processes.supervisor import free_ports
from rollout_bridge.rendering.rendering import Rendering


def main() -> None:
    """Measure, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--conversations", type=int, default=40, help="for a side and round")
    print(_compared_workers(parser.parse_args(), lab_rendering()))


def _compared_workers(given: argparse.Namespace, rendering: Rendering) -> str:
    """One worker and several, in front of one engine."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine, _ = start_engine(stack, rendering, REPLY_TOKENS)
        ports = free_ports(2)
        sides = []
        for workers, port in zip((1, given.workers), ports, strict=True):
            of_side = folder / str(len(sides))
            pid = start_proxy(stack, of_side, engine, port, workers)
            url = f"http://127.0.0.1:{port}"
            wait_for(f"{url}/readyz", of_side / "ours.log")
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
            await conversation(session, side, next(numbers))

        at_once = dict(
            zip((side.name for side in sides), (AT_ONCE, AT_ONCE * given.workers), strict=True)
        )
        for side in sides:
            await cost_us(side, 4 * AT_ONCE, talk)  # what only first requests do
        for _ in track(range(given.rounds), description="rounds"):
            for side in random.sample(sides, len(sides)):
                began = time.perf_counter()
                cost = await cost_us(side, given.conversations, talk, at_once[side.name])
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
    sizes = " | ".join(f"{memory_mib(side.pid):.0f} MiB" for side in sides)
    shown.append(f"| resident memory, all processes | {sizes} | |")
    of_workers = [line for line in lines if line.startswith('opd_requests_total{status="200"')]
    return "\n".join([*shown, "", *of_workers])


if __name__ == "__main__":
    main()
