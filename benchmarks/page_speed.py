"""How fast the pages are on a long reply, and what watching costs the proxy.

    python -m benchmarks.page_speed [--tokens 16384] [--tabs 10] [--seconds 30]

The tool lab takes two steps. Its store gets a turn with a reply of so many tokens, judged, scored
and trained, and the run's engine and proxy are started again. Printed are the milliseconds until a
page is there (median and p95 of 20), and until Chromium, if it is installed, first paints it. Then
so many readers keep *Now* open, as tabs do; printed is what that takes of one core of the proxy's
process, beyond what it takes without them.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import aiohttp
import numpy as np
import psutil
from playwright.async_api import async_playwright

from benchmarks.own_agent.table import markdown
from benchmarks.proxy_processes import percentile
from benchmarks.store_scale import OWNER, SCOPE, take_step
from benchmarks.store_writes import next_turn, score_of, verdict_of
from opd.processes.supervisor import free_ports
from opd.run import config as run_config
from records.config import StoreConfig
from records.names import TurnState
from records.store import Store
from records.types import VersionSpan

CALLS = 20
VOCABULARY = 700
"""Ids that the lab's tokenizer can decode."""
_FIRST_PAINT = """() => new Promise((done) => {
  const read = (list) => list.getEntriesByName("first-contentful-paint")
    .forEach((entry) => done(entry.startTime));
  new PerformanceObserver(read).observe({type: "paint", buffered: true});
})"""


async def fill(config: StoreConfig, tokens: int) -> str:
    """Store a turn with a reply of so many tokens, up to the step that trained it; its id."""
    rng = np.random.default_rng(0)
    async with await Store.open(config) as store:
        session_id = await store.ensure_session(scope=SCOPE, external_id=None)
        turn = replace(
            next_turn(rng, session_id, None),
            response_ids=rng.integers(0, VOCABULARY, tokens, dtype=np.int32),
            rollout_logprobs=-rng.random(tokens, dtype=np.float32),
            version_spans=(VersionSpan(version=0, start=0, end=tokens),),
        )
        await store.record_turn(turn, scope=SCOPE)
        await store.set_next_state(turn.turn_id, [{"role": "user", "content": "In Celsius."}])
        while judged := await store.claim(TurnState.JUDGING, owner=OWNER, limit=8, ttl_s=600.0):
            for one in judged:
                await store.commit_verdict(OWNER, verdict_of(one), None)
        while scored := await store.claim(TurnState.SCORING, owner=OWNER, limit=8, ttl_s=600.0):
            for one in scored:
                await store.commit_scores(OWNER, [score_of(one)])
        trained: list[str] = []
        while turn.turn_id not in trained:
            trained = await take_step(store, await store.next_version(), 8)
            if not trained:
                raise SystemExit("the turn did not become ready")
    return turn.turn_id


async def answer_times(session: aiohttp.ClientSession, path: str) -> tuple[list[float], int]:
    """Milliseconds of each call until the whole answer is there, and its bytes."""
    found, size = [], 0
    for _ in range(CALLS + 1):
        begun = time.perf_counter()
        async with session.get(path) as reply:
            reply.raise_for_status()
            size = len(await reply.read())
        found.append(1e3 * (time.perf_counter() - begun))
    return found[1:], size


async def first_paints(url: str, paths: dict[str, str]) -> dict[str, float]:
    """Milliseconds until Chromium paints each page for the first time; {} without Chromium."""
    program = shutil.which("chromium")
    if program is None:
        return {}
    found = {}
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=program)
        for name, path in paths.items():
            # The second visit has the styles in its cache, as a user's has.
            page = await browser.new_page()
            for _ in range(2):
                await page.goto(url + path)
            found[name] = await page.evaluate(_FIRST_PAINT)
            await page.close()
        await browser.close()
    return found


async def share_of_a_core(process: psutil.Process, seconds: float) -> float:
    """What the process uses of one core."""
    before = sum(process.cpu_times()[:2])
    await asyncio.sleep(seconds)
    return (sum(process.cpu_times()[:2]) - before) / seconds


async def watching(url: str, process: psutil.Process, tabs: int, seconds: float) -> float:
    """Share of a core that open pages of *Now* take."""
    alone = await share_of_a_core(process, seconds)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession(url))
        readers = []
        for _ in range(tabs):
            events = await stack.enter_async_context(session.get("/ui/now/events"))
            events.raise_for_status()
            readers.append(asyncio.create_task(events.read()))
        watched = await share_of_a_core(process, seconds)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    return watched - alone


async def measure(url: str, pid: int, turn_id: str, tabs: int, seconds: float) -> None:
    """Measure and print."""
    paths = {
        "a turn": f"/ui/turns/{turn_id}",
        "Now": "/ui/now",
        "Sessions": "/ui/sessions",
        "Training": "/ui/training",
    }
    paints = await first_paints(url, paths)
    rows = []
    async with aiohttp.ClientSession(url) as session:
        for name, path in paths.items():
            times, size = await answer_times(session, path)
            paint = f"{paints[name]:.0f}" if name in paints else "no Chromium"
            median, most = percentile(times, 0.5), percentile(times, 0.95)
            rows.append((name, f"{median:.0f}", f"{most:.0f}", f"{size / 1024:,.0f}", paint))
    print(markdown(("page", "median, ms", "p95, ms", "KiB", "first paint, ms"), rows))
    share = await watching(url, psutil.Process(pid), tabs, seconds)
    print(f"\n{tabs} tabs of Now: {share:.1%} of a core of the proxy's process")


def main() -> None:
    """Fill, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--tabs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=30.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        run = Path(folder) / "lab"
        lab = ["--updates", "2", "--eval-samples", "16", "--max-seconds", "240"]
        subprocess.run(
            [sys.executable, "-m", "examples.tool_lab", "--run", str(run), *lab],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        config = run_config.load(run / "config.toml")
        turn_id = asyncio.run(fill(config.store, given.tokens))
        commands = {config.policy.base_url + "/health": ["engine", "--role", "policy"]}
        proxy_url = f"http://127.0.0.1:{free_ports(1)[0]}"
        port = f"proxy.port={proxy_url.rpartition(':')[2]}"
        commands[f"{proxy_url}/readyz"] = ["proxy", "--set", port]
        pids = [started(stack, words, run, url) for url, words in commands.items()]
        asyncio.run(measure(proxy_url, pids[-1], turn_id, given.tabs, given.seconds))


def started(stack: ExitStack, words: list[str], run: Path, url: str) -> int:
    """The id of a process of the run that answers at `url`, and is stopped with the stack."""
    command = [sys.executable, "-m", "opd.cli.app", *words, "--run", str(run)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    for _ in range(600):
        with suppress(OSError), urllib.request.urlopen(url, timeout=5) as reply:
            if reply.status == 200:
                return process.pid
        if process.poll() is not None:
            break
        time.sleep(0.2)
    raise SystemExit(f"{' '.join(words)}: does not answer at {url}")


if __name__ == "__main__":
    main()
