"""How fast several processes write one store, grouped and with a transaction for each operation.

    python -m benchmarks.store_writes --seconds 60 --processes 4 [--url postgresql+asyncpg://...]

Each process acts as a proxy (agents that record turns and give them their next state) and as the
workers (claim, verdict, score) at once, as fast as it can; with `--no-workers` only as a proxy. The
two ways of writing alternate every few seconds in the same run, each on a fresh database, so that
both see the same machine. Lock errors are operations that ended in StoreUnavailable; lock retries
are transactions tried again.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import numpy as np
from sqlalchemy import text
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import create_async_engine

from records.config import StoreConfig
from records.errors import StoreUnavailable
from records.names import TurnState, TurnType
from records.store import Store
from records.types import CapturedTurn, Ids, Score, TurnRecord, Verdict, VersionSpan, Vote

T = TypeVar("T")

PROMPT_IDS = 600
RESPONSE_IDS = 80
TURNS_PER_SESSION = 12
ROWS = {"record_turn": 4, "set_next_state": 1, "commit_verdict": 5, "commit_score": 2}
"""Rows that an operation writes (a turn: two messages, turn, tokens); a claim: one per turn."""
MODES = {"grouped": 256, "one transaction per operation": 1}
"""Way of writing -> most operations in one transaction."""


@dataclass(slots=True)
class Figures:
    """What one process, or all of them, measured in one way of writing."""

    seconds: float = 0.0
    rows: int = 0
    lock_errors: int = 0
    lock_retries: int = 0
    latencies_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, other: Figures) -> None:
        """Sum of both; `seconds` is left alone, as the processes run at the same time."""
        self.rows += other.rows
        self.lock_errors += other.lock_errors
        self.lock_retries += other.lock_retries
        for operation, latencies in other.latencies_s.items():
            self.latencies_s[operation] += latencies


class Load:
    """The load of one process on one store until `deadline` (time.monotonic)."""

    def __init__(self, store: Store, deadline: float) -> None:
        self.store = store
        self.deadline = deadline
        self.figures = Figures()

    @property
    def running(self) -> bool:
        """Whether there is time left."""
        return time.monotonic() < self.deadline

    async def measured(
        self, operation: str, awaitable: Awaitable[T], rows: Callable[[T], int] | None = None
    ) -> T | None:
        """Await a store operation, note its latency and rows; None if the database was locked."""
        started = time.perf_counter()
        try:
            result = await awaitable
        except StoreUnavailable:
            self.figures.lock_errors += 1
            return None
        self.figures.latencies_s[operation].append(time.perf_counter() - started)
        self.figures.rows += ROWS[operation] if rows is None else rows(result)
        return result

    async def agent(self, rng: np.random.Generator) -> None:
        """Conversations whose turns extend one another."""
        while self.running:
            scope = "bench"
            session_id = await self.store.ensure_session(scope=scope, external_id=uuid4().hex)
            previous: CapturedTurn | None = None
            for _ in range(TURNS_PER_SESSION):
                if not self.running:
                    return
                turn = next_turn(rng, session_id, previous)
                # As the proxy does: it knows how long the turn is that a conversation continues.
                known = turn.num_shared_ids or None
                recording = self.store.record_turn(turn, scope=scope, parent_length=known)
                await self.measured("record_turn", recording)
                if previous is not None:
                    reply = turn.messages[-1:]
                    update = self.store.set_next_state(previous.turn_id, reply)
                    await self.measured("set_next_state", update)
                previous = turn

    async def worker(self, state: TurnState, owner: str) -> None:
        """Claim and commit verdicts, or scores."""
        while self.running:
            claim = self.store.claim(state, owner=owner, limit=16, ttl_s=60.0)
            turns = await self.measured("claim", claim, rows=len)
            if not turns:
                await asyncio.sleep(0.01)
                continue
            commits = [self.commit(state, owner, turn) for turn in turns]
            await asyncio.gather(*commits)

    async def commit(self, state: TurnState, owner: str, turn: TurnRecord) -> None:
        """The verdict or the score of one turn."""
        if state is TurnState.JUDGING:
            commit = self.store.commit_verdict(owner, verdict_of(turn), None)
            await self.measured("commit_verdict", commit)
        else:
            await self.measured("commit_score", self.store.commit_scores(owner, [score_of(turn)]))


def next_turn(
    rng: np.random.Generator, session_id: str, previous: CapturedTurn | None
) -> CapturedTurn:
    """A turn whose prompt extends that of `previous` by its response and a user message."""
    user = {"role": "user", "content": f"{uuid4().hex} " * 8}
    messages = [{"role": "system", "content": "You can call tools. " * 40}, user]
    prompt_ids: Ids = rng.integers(0, 32_000, PROMPT_IDS, dtype=np.int32)
    shared = 0
    if previous is not None:
        messages = [*previous.messages, previous.response, user]
        history = np.concatenate([previous.prompt_ids, previous.response_ids])
        shared = len(history)
        prompt_ids = np.concatenate([history, prompt_ids[:40]])
    return CapturedTurn(
        turn_id=uuid4().hex,
        session_id=session_id,
        parent_turn_id=previous.turn_id if previous else None,
        turn_type=TurnType.MAIN,
        messages=messages,
        tools=[{"type": "function", "function": {"name": "search"}}],
        response={"role": "assistant", "content": "An answer. " * 20},
        prompt_ids=prompt_ids,
        response_ids=rng.integers(0, 32_000, RESPONSE_IDS, dtype=np.int32),
        rollout_logprobs=-rng.random(RESPONSE_IDS, dtype=np.float32),
        token_parent_id=previous.turn_id if previous else None,
        num_shared_ids=shared,
        sampling={"temperature": 1.0},
        distribution_modified=None,
        version_spans=(VersionSpan(version=0, start=0, end=RESPONSE_IDS),),
        finish_reason="stop",
        latency_s=0.5,
    )


def verdict_of(turn: TurnRecord) -> Verdict:
    """Three votes and a hint."""
    hint = "Use Celsius unless the user asks for Fahrenheit."
    votes = tuple(
        Vote(
            index=index,
            score=1,
            hint=hint,
            text=f"\\boxed{{1}} [HINT_START]{hint}[HINT_END]",
            latency_s=0.3,
            prompt_tokens=700,
            completion_tokens=30,
        )
        for index in range(3)
    )
    return Verdict(turn_id=turn.turn_id, votes=votes, hint=hint, selection="longest", judge="j")


def score_of(turn: TurnRecord) -> Score:
    """A hinted prompt with twenty more ids, and log-probs."""
    hinted = np.insert(turn.prompt_ids, len(turn.prompt_ids) - 5, np.arange(20, dtype=np.int32))
    return Score(
        turn_id=turn.turn_id,
        hint=turn.hint or "",
        teacher="start",
        teacher_version="0",
        hinted_prompt_ids=hinted,
        teacher_logprobs=turn.rollout_logprobs * np.float32(0.5),
        latency_s=0.05,
    )


async def load_process(
    url: str, group_max: int, seconds: float, agents: int, seed: int, workers: bool
) -> Figures:
    """The whole load of one process for `seconds`."""
    config = StoreConfig(url=url, group_max=group_max)
    async with await Store.open(config) as store:
        load = Load(store, time.monotonic() + seconds)
        rng = np.random.default_rng(seed)
        owner = f"worker-{seed}"
        states = (TurnState.JUDGING, TurnState.SCORING) if workers else ()
        await asyncio.gather(
            *(load.agent(rng) for _ in range(agents)),
            *(load.worker(state, owner) for state in states),
        )
        load.figures.lock_retries = store.writer.num_retries
        return load.figures


def _process(arguments: tuple[str, int, float, int, int, bool]) -> Figures:
    return asyncio.run(load_process(*arguments))


async def postgresql_database(url: str, statement: str, name: str) -> None:
    """CREATE DATABASE or DROP DATABASE `name` on the server of `url`."""
    engine = create_async_engine(url, isolation_level="AUTOCOMMIT")
    async with engine.connect() as connection:
        await connection.execute(text(f'{statement} "{name}"'))
    await engine.dispose()


def fresh_urls(url: str | None, folder: Path) -> dict[str, str]:
    """One new, migrated database for each way of writing."""
    urls = {}
    for number, mode in enumerate(MODES):
        if url is None:
            urls[mode] = StoreConfig.sqlite(folder / f"{number}.db").url
        else:
            name = f"store_writes_{uuid4().hex[:12]}"
            asyncio.run(postgresql_database(url, "CREATE DATABASE", name))
            urls[mode] = make_url(url).set(database=name).render_as_string(hide_password=False)
        asyncio.run(_open_once(urls[mode]))
    return urls


async def _open_once(url: str) -> None:
    await (await Store.open(StoreConfig(url=url))).close()


def measure(arguments: argparse.Namespace, urls: dict[str, str]) -> dict[str, Figures]:
    """Both ways of writing, alternating, for `seconds` each."""
    totals = {mode: Figures() for mode in MODES}
    rounds = max(1, round(arguments.seconds / arguments.slice))
    seconds = arguments.seconds / rounds
    works = not arguments.no_workers
    context = multiprocessing.get_context("spawn")
    with context.Pool(arguments.processes) as pool:
        for number in range(rounds):
            for mode, group_max in MODES.items():
                seeds = range(number * 100, number * 100 + arguments.processes)
                tasks = [
                    (urls[mode], group_max, seconds, arguments.agents, seed, works)
                    for seed in seeds
                ]
                for figures in pool.map(_process, tasks, chunksize=1):
                    totals[mode].add(figures)
                totals[mode].seconds += seconds
                rate = totals[mode].rows / totals[mode].seconds
                print(f"round {number + 1}/{rounds}: {mode}: {rate:,.0f} rows/s so far", flush=True)
    return totals


def report(totals: dict[str, Figures]) -> None:
    """Print the table and the ratio."""
    for mode, figures in totals.items():
        print(
            f"\n{mode}: {figures.rows / figures.seconds:,.0f} rows/s, "
            f"{figures.lock_errors} lock errors, {figures.lock_retries} lock retries"
        )
        print(
            f"  {'operation':16}{'count':>9}{'a second':>10}"
            f"{'p50 ms':>10}{'p99 ms':>10}{'max ms':>10}"
        )
        for operation, latencies in sorted(figures.latencies_s.items()):
            p50, p99 = np.percentile(latencies, [50, 99]) * 1000
            worst = max(latencies) * 1000
            count = len(latencies)
            rate = count / figures.seconds
            print(f"  {operation:16}{count:9,}{rate:10.1f}{p50:10.1f}{p99:10.1f}{worst:10.1f}")
    grouped, single = (totals[mode].rows / totals[mode].seconds for mode in MODES)
    print(f"\ngrouped / one transaction per operation: {grouped / single:.1f} times the rows/s")


def main() -> None:
    """Parse the options, measure, report, remove the databases."""
    parser = argparse.ArgumentParser(description="How fast several processes write one store.")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each way of writing")
    parser.add_argument("--slice", type=float, default=10.0, help="seconds between alternations")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--agents", type=int, default=16, help="concurrent agents per process")
    parser.add_argument("--no-workers", action="store_true", help="nobody judges or scores")
    parser.add_argument(
        "--folder", type=Path, help="where the SQLite files go (default: temporary)"
    )
    parser.add_argument("--url", help="a PostgreSQL server; default is SQLite")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        urls = fresh_urls(arguments.url, Path(folder))
        try:
            report(measure(arguments, urls))
        finally:
            for url in urls.values() if arguments.url else ():
                name = make_url(url).database or ""
                asyncio.run(postgresql_database(arguments.url, "DROP DATABASE", name))


if __name__ == "__main__":
    main()
