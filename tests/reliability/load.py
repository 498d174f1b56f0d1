"""What goes on while processes die: scripted agents that talk, and a database that locks up.

The agents are the tool lab's. They begin no new conversation while the judge or the trainer has
enough to do, so that every stage always has work and none has a backlog.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import asyncpg
import httpx
import openai

from examples.tool_lab.agent import AgentConfig, run_session
from records.config import StoreConfig
from records.names import TurnState
from records.store import Store
from tests.reliability.client_log import ClientLog, LoggingTransport

NUM_AGENTS = 6
ENOUGH = {TurnState.JUDGING: 24, TurnState.READY: 32}
"""Turns that wait for the judge, and for the trainer."""
LOCKED_S = 4.5
"""Longer than a proxy waits for the store before it spills."""


class Agents:
    """Conversations through the proxy until `stop`."""

    def __init__(self, base_url: str, model: str, log: ClientLog, seed: int) -> None:
        self._base_url = base_url
        self._agent = AgentConfig(model=model)
        self._log = log
        self._seeds = itertools.count(seed * 1_000_000)
        self._gate = asyncio.Event()
        self._stopped = False

    async def run(self, store: Store) -> None:
        """Talk until `stop`; then end the conversations that are under way."""
        http = httpx.AsyncClient(transport=LoggingTransport(self._log), timeout=600)
        async with (
            openai.AsyncOpenAI(
                base_url=self._base_url, api_key="lab", max_retries=6, http_client=http
            ) as client,
            asyncio.TaskGroup() as group,
        ):
            group.create_task(self._steer(store))
            for _ in range(NUM_AGENTS):
                group.create_task(self._talk(client))

    def stop(self) -> None:
        """Begin no further conversation."""
        self._stopped = True
        self._gate.set()

    async def _talk(self, client: openai.AsyncOpenAI) -> None:
        while True:
            await self._gate.wait()
            if self._stopped:
                return
            try:
                report = await run_session(client, next(self._seeds), self._agent)
                is_broken = report.ended == "failed"
            except httpx.TransportError:  # a stream that broke off
                is_broken = True
            if is_broken:
                await asyncio.sleep(0.5)

    async def _steer(self, store: Store) -> None:
        while not self._stopped:
            counts = await store.counts()
            if self._stopped or all(counts[state] < most for state, most in ENOUGH.items()):
                self._gate.set()
            else:
                self._gate.clear()
            await asyncio.sleep(0.5)


async def lock_now_and_then(config: StoreConfig, rng: random.Random) -> None:
    """Hold the database's write lock for a while, again and again, until cancelled."""
    while True:
        await asyncio.sleep(rng.uniform(5.0, 20.0))
        path = config.sqlite_path
        if path is None:
            await _lock_server(config.url.replace("+asyncpg", ""))
        else:
            await asyncio.to_thread(_hold_file, path)


def _hold_file(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None, timeout=60)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        time.sleep(LOCKED_S)
        connection.execute("ROLLBACK")


async def _lock_server(url: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        async with connection.transaction():
            await connection.execute("LOCK TABLE turns IN EXCLUSIVE MODE")
            await asyncio.sleep(LOCKED_S)
    finally:
        await connection.close()
