"""Two workers serve one port: conversations that wander between them, limits, kills, signals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio

from opd.run.config import RunConfig
from records.keys import KeyLimits, Keys
from records.names import TurnState
from records.spill.spill import waiting_files
from records.store import Store
from records.types import TurnRecord
from tests.integration.test_run_metrics import samples_of
from tests.integration.test_stop_signal import HI, REPLY, configured, scripted_engine
from tests.records.looking import list_turns

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(180)


@dataclass
class Line:
    """A connection that is kept, and the worker at its other end."""

    client: httpx.AsyncClient
    pid: int


@dataclass
class Endpoint:
    """`opd proxy` with two workers."""

    config: RunConfig
    process: asyncio.subprocess.Process
    log: Path
    lines: list[Line] = field(default_factory=list)
    known: set[str] = field(default_factory=set)
    """Turns that were named."""

    @property
    def url(self) -> str:
        return f"http://{self.config.proxy.host}:{self.config.proxy.port}"

    def pids(self) -> set[int]:
        """Of the workers."""
        return {one.pid for one in psutil.Process(self.process.pid).children()}

    async def dial(self) -> Line:
        """A new connection."""
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1)
        client = httpx.AsyncClient(base_url=self.url, limits=limits, timeout=60)
        response = await client.get("/healthz")
        _, port = response.extensions["network_stream"].get_extra_info("client_addr")
        for pid in self.pids():
            for one in psutil.Process(pid).net_connections("tcp"):
                if one.raddr and one.raddr.port == port:
                    line = Line(client, pid)
                    self.lines.append(line)
                    return line
        raise AssertionError("no worker has this connection")

    async def one_to_each(self) -> tuple[Line, Line]:
        """A connection to each worker."""
        found: dict[int, Line] = {}
        async with asyncio.timeout(60):
            while len(found) < 2:
                line = await self.dial()
                found.setdefault(line.pid, line)
                if found[line.pid] is not line:
                    await asyncio.sleep(0.02)
        first, second = found.values()
        return first, second

    async def new_turns(self) -> list[TurnRecord]:
        """Turns that an earlier call did not name, oldest first."""
        async with await Store.open(self.config.store) as store:
            named = [ref.turn_id for ref in await list_turns(store)]
            turns = await store.turns([one for one in named if one not in self.known])
        self.known.update(named)
        return sorted(turns, key=lambda turn: turn.created_at)


@contextlib.asynccontextmanager
async def endpoint(config: RunConfig, folder: Path) -> AsyncIterator[Endpoint]:
    """Both workers answer."""
    log = folder / "endpoint.log"
    words = ["-m", "opd.cli.app", "proxy", "--run", str(folder), "--set", "proxy.workers=2"]
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *words, cwd=ROOT, stdout=out, stderr=out
        )
    running = Endpoint(config, process, log)
    try:
        await until(lambda: said(running, "2 workers serve"))
        yield running
    finally:
        for line in running.lines:
            await line.client.aclose()
        if process.returncode is None:
            process.terminate()
            await asyncio.wait_for(process.wait(), 60)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Endpoint]:
    """An endpoint of two workers that no test ends."""
    folder = tmp_path_factory.mktemp("workers")
    async with scripted_engine(reply_s=1.5) as engine_url:
        async with endpoint(configured(folder, engine_url), folder) as running:
            yield running
        assert running.process.returncode == 0
    assert waiting_files(running.config.store.spill_path) == []


async def said(running: Endpoint, words: str) -> bool:
    assert running.process.returncode is None, running.log.read_text()[-2000:]
    return words in running.log.read_text()


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 90.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.1)


async def ask(line: Line, messages: list[dict], **fields: Any) -> httpx.Response:
    body = {"model": "policy", "messages": messages, **fields}
    return await line.client.post("/v1/chat/completions", json=body)


@dataclass
class Stream:
    """A reply as it came: its turn, its text, whether it came to its end."""

    turn_id: str = ""
    text: str = ""
    is_whole: bool = False
    error: str | None = None
    began: asyncio.Event = field(default_factory=asyncio.Event)


async def listen(line: Line, messages: list[dict], into: Stream) -> None:
    body = {"model": "policy", "messages": messages, "stream": True}
    try:
        async with line.client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            async for one in response.aiter_lines():
                if one == "data: [DONE]":
                    into.is_whole = True
                elif one.startswith("data: "):
                    chunk = json.loads(one.removeprefix("data: "))
                    if "error" in chunk:
                        continue
                    into.turn_id = chunk["id"].removeprefix("chatcmpl-")
                    into.text += chunk["choices"][0]["delta"].get("content") or ""
                    into.began.set()
    except httpx.HTTPError as error:
        into.error = type(error).__name__


def check_chain(turns: list[TurnRecord]) -> None:
    """One session, each turn the parent of the next."""
    assert len({turn.session_id for turn in turns}) == 1
    assert [turn.parent_turn_id for turn in turns] == [None, *(turn.turn_id for turn in turns[:-1])]
    states = [TurnState.JUDGING] * (len(turns) - 1) + [TurnState.AWAITING_NEXT_STATE]
    assert [turn.state for turn in turns] == states


@pytest.mark.asyncio(loop_scope="module")
async def test_a_conversation_that_alternates_between_workers_is_stored_once_and_linked(
    shared: Endpoint,
) -> None:
    lines = await shared.one_to_each()
    history: list[dict] = []
    for number in range(6):
        history.append({"role": "user", "content": f"Question {number}"})
        response = await ask(lines[number % 2], history)
        assert response.status_code == 200, response.text
        history.append(response.json()["choices"][0]["message"])
    turns = await shared.new_turns()
    assert len(turns) == 6
    check_chain(turns)
    for line in lines:
        await line.client.get("/metrics")  # shows its own newest, and later to all
    for line in lines:
        scraped = samples_of((await line.client.get("/metrics")).text)

        def of_each(name: str, found: dict[str, float] = scraped) -> list[float]:
            return [found[f"{name},worker={number}}}"] for number in (1, 2)]

        assert of_each("opd_turns_total{drop_reason=none") == [3, 3]
        # The prompts extend turns that the other worker has sampled.
        assert sorted(of_each("opd_bridge_total{how=extended")) == [2, 3]
        assert scraped["opd_process_metrics_age_seconds{process=proxy.2}"] < 60


@pytest.mark.asyncio(loop_scope="module")
async def test_a_killed_worker_loses_its_streams_and_nothing_that_was_answered(
    shared: Endpoint,
) -> None:
    await shared.new_turns()
    victim, other = await shared.one_to_each()
    before = await ask(victim, HI)
    streams = [Stream() for _ in range(4)]
    lines = [victim, other, *[await shared.dial() for _ in range(2)]]
    tasks = [
        asyncio.create_task(listen(line, [{"role": "user", "content": f"Story {number}"}], stream))
        for number, (line, stream) in enumerate(zip(lines, streams, strict=True))
    ]
    await asyncio.gather(*(stream.began.wait() for stream in streams))
    os.kill(victim.pid, signal.SIGKILL)
    killed_at = time.monotonic()
    # Whoever comes now is answered: by the other worker, at once.
    async with httpx.AsyncClient(base_url=shared.url, timeout=60) as client:
        answer = await ask(Line(client, 0), [{"role": "user", "content": "Still there?"}])
    assert answer.status_code == 200
    await asyncio.gather(*tasks)
    for line, stream in zip(lines, streams, strict=True):
        assert stream.is_whole is (line.pid != victim.pid)
        assert (stream.error is None) is stream.is_whole
        assert not stream.is_whole or stream.text == REPLY
    await until(lambda: came_back(shared, victim.pid))
    assert time.monotonic() - killed_at < 60
    newest = await shared.one_to_each()
    for number, line in enumerate(newest):
        reply = await ask(line, [{"role": "user", "content": f"Welcome {number}"}])
        assert reply.status_code == 200
    acknowledged = {
        before.json()["id"].removeprefix("chatcmpl-"),
        answer.json()["id"].removeprefix("chatcmpl-"),
        *(stream.turn_id for stream in streams if stream.is_whole),
    }
    turns = {turn.turn_id for turn in await shared.new_turns()}
    assert acknowledged <= turns
    lost = {stream.turn_id for stream in streams if not stream.is_whole}
    assert lost
    assert not lost & turns
    assert len(turns) == len(acknowledged) + 2
    assert "ended by signal SIGKILL" in shared.log.read_text()


async def came_back(running: Endpoint, killed: int) -> bool:
    pids = running.pids()
    return killed not in pids and len(pids) == 2


@pytest.mark.asyncio(loop_scope="module")
async def test_limits_of_a_key_hold_whichever_worker_answers(shared: Endpoint) -> None:
    """It comes last of those that share an endpoint: once a key exists, requests need one."""
    async with await Store.open(shared.config.store) as store:
        keys = Keys(store, time.time)
        _, few = await keys.create(actor="test", limits=KeyLimits(requests_per_minute=3))
        _, single = await keys.create(actor="test", limits=KeyLimits(max_concurrent=1))
    lines = await shared.one_to_each()
    for line in lines:

        async def needs_a_key(line: Line = line) -> bool:
            return (await line.client.get("/v1/models")).status_code == 401

        # A worker that has just read that there are no keys looks again `key_refresh_s` later.
        await until(needs_a_key, 30)
    for line in lines:
        line.client.headers["authorization"] = f"Bearer {few}"
    statuses = [
        (await lines[number % 2].client.get("/v1/models")).status_code for number in range(5)
    ]
    assert statuses == [200, 200, 200, 429, 429]
    for line in lines:
        line.client.headers["authorization"] = f"Bearer {single}"
    stream = Stream()
    listening = asyncio.create_task(listen(lines[0], HI, stream))
    await stream.began.wait()
    refused = await ask(lines[1], HI)
    assert refused.status_code == 429
    assert "max_concurrent = 1" in refused.json()["error"]["message"]
    await listening
    assert stream.is_whole

    async def answered() -> bool:
        return (await ask(lines[1], HI)).status_code == 200

    await until(answered, 10)  # the place is left just after the last chunk


async def test_a_signal_ends_the_replies_of_both_workers_and_a_second_one_hurries(
    tmp_path: Path,
) -> None:
    async with scripted_engine() as engine_url:
        config = configured(tmp_path, engine_url)
        async with endpoint(config, tmp_path) as running:
            lines = await running.one_to_each()
            streams = [Stream(), Stream()]
            tasks = [
                asyncio.create_task(listen(line, [{"role": "user", "content": f"{number}"}], one))
                for number, (line, one) in enumerate(zip(lines, streams, strict=True))
            ]
            await asyncio.gather(*(one.began.wait() for one in streams))
            running.process.send_signal(signal.SIGTERM)
            await asyncio.gather(*tasks)
            assert [one.text for one in streams] == [REPLY, REPLY]
            assert await asyncio.wait_for(running.process.wait(), 30) == 0
        assert [turn.state for turn in await running.new_turns()] == [
            TurnState.AWAITING_NEXT_STATE
        ] * 2
        async with endpoint(config, tmp_path) as running:
            lines = await running.one_to_each()
            streams = [Stream(), Stream()]
            tasks = [
                asyncio.create_task(listen(line, HI, one))
                for line, one in zip(lines, streams, strict=True)
            ]
            await asyncio.gather(*(one.began.wait() for one in streams))
            running.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.3)
            running.process.send_signal(signal.SIGTERM)
            await asyncio.gather(*tasks)
            assert await asyncio.wait_for(running.process.wait(), 30) == 0
            assert all(len(one.text) < len(REPLY) for one in streams)
            assert running.log.read_text().count("SIGTERM again: not waiting any longer") == 2
