"""`opd serve`, started and stopped like a user does it, and the data of its endpoint and store."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
from sqlalchemy import Connection, func, select

from benchmarks.own_agent.agent import Endpoint
from opd.processes.supervisor import free_ports
from opd.run import config as run_config
from records.hints.rows import HintRow
from records.lessons.rows import LessonRow
from records.store import Store

ROOT = Path(__file__).parents[2]
MODEL = Path("examples/tool_lab/model")
START_S = 300.0
STOP_S = 300.0
REQUEST_S = 120.0


def model_checksum() -> str:
    """Eight hexadecimal digits that distinguish the start weights from earlier and later ones."""
    return hashlib.sha256((ROOT / MODEL / "model.safetensors").read_bytes()).hexdigest()[:8]


def end_when_told() -> None:
    """Cancel this task on SIGINT or SIGTERM, so that it ends what it has started."""
    this = asyncio.current_task()
    assert this is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, this.cancel)


class ServeFailed(RuntimeError):
    """`opd serve` ended, or did not answer in time; the message names its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A running `opd serve`. `key`: the key for reading the hint memory, if there are keys."""

    url: str
    folder: Path
    endpoint: Endpoint
    process: asyncio.subprocess.Process
    key: str | None = None

    async def hints(self) -> list[dict[str, Any]]:
        """All hints of the memory, from `GET /v1/hints`."""
        found: list[dict[str, Any]] = []
        headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        async with httpx.AsyncClient(base_url=self.url, headers=headers, timeout=REQUEST_S) as http:
            while True:
                query = {"limit": "100"} | ({"after": found[-1]["id"]} if found else {})
                reply = (await http.get("/v1/hints", params=query)).raise_for_status().json()
                found += reply["data"]
                if not reply["has_more"]:
                    return found


@asynccontextmanager
async def serving(
    folder: Path, settings: Sequence[str], words: Sequence[str] = (), *, model: Path = MODEL
) -> AsyncIterator[Served]:
    """`opd serve` in a new run folder until the body ends, then Ctrl-C.

    `settings` are passed to it as `--set`, `words` unchanged. Its output goes to FOLDER.log. Raises
    ServeFailed.
    """
    port = free_ports(1)[0]
    command = [sys.executable, "-m", "opd.cli.app", "serve", "--model", str(model)]
    command += ["--run", str(folder.resolve()), "--port", str(port)]
    command += [*words, *(word for one in settings for word in ("--set", one))]
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = log_of(folder)
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, stdout=output, stderr=asyncio.subprocess.STDOUT
        )
    url = f"http://127.0.0.1:{port}"
    try:
        await _until_ready(url, process, log)
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=REQUEST_S)
        async with client:
            endpoint = Endpoint(client=client)
            yield Served(url=url, folder=folder, endpoint=endpoint, process=process)
    finally:
        await _stop(process, log)


def log_of(folder: Path) -> Path:
    """Where the output of `opd serve` in this run folder goes."""
    return folder.with_name(f"{folder.name}.log")


async def _until_ready(url: str, process: asyncio.subprocess.Process, log: Path) -> None:
    async with httpx.AsyncClient(timeout=5.0) as http:
        for _ in range(int(START_S / 0.5)):
            if process.returncode is not None:
                raise ServeFailed(f"opd serve ended with {process.returncode}: see {log}")
            try:
                if (await http.get(f"{url}/readyz")).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.5)
    raise ServeFailed(f"no answer from opd serve after {START_S:.0f} s: see {log}")


async def _stop(process: asyncio.subprocess.Process, log: Path) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGINT)
    try:
        async with asyncio.timeout(STOP_S):
            code = await process.wait()
    except TimeoutError:
        process.kill()
        raise ServeFailed(f"opd serve did not stop within {STOP_S:.0f} s: see {log}") from None
    if code:
        raise ServeFailed(f"opd serve ended with {code}: see {log}")


async def what_became(folder: Path) -> dict[str, Any]:
    """Data from the run's store: versions, and what became of turns and lessons, by reason."""
    config = run_config.load(folder / "config.toml")
    async with await Store.open(config.store) as store:
        latest, votes = await store.latest_version(), await store.vote_summary()
        lessons = await store.read(_lessons)
        return {
            "version": 0 if latest is None else latest.version,
            "turns": {state.value: n for state, n in (await store.counts()).items() if n},
            "drops": {reason.value: n for reason, n in (await store.drops()).items() if n},
            "accepted": votes.accepted,
            "lessons": lessons,
            **await store.read(_hint_rows),
            "lesson_drops": {
                reason.value: n for reason, n in (await store.lesson_drops()).items() if n
            },
        }


def _lessons(connection: Connection) -> dict[str, int]:
    """Lessons by kind and state, including those that are trained or dropped."""
    statement = select(LessonRow.kind, LessonRow.state, func.count()).group_by(
        LessonRow.kind, LessonRow.state
    )
    return {f"{kind.value} {state.value}": n for kind, state, n in connection.execute(statement)}


def _hint_rows(connection: Connection) -> dict[str, Any]:
    """Rows of the hint memory by status, how many of them are rules, and how many were practised
    (one of their lessons has trained).
    """
    by_status = select(HintRow.status, func.count()).group_by(HintRow.status)
    rules = select(func.count()).where(HintRow.is_rule.is_(True))
    practised = select(func.count()).where(HintRow.num_steps > 0)
    return {
        "hint_rows": {status.value: n for status, n in connection.execute(by_status)},
        "rules": connection.scalar(rules) or 0,
        "practised": connection.scalar(practised) or 0,
    }
