"""How fast ready turns are handed to slime's trainer, and whether memory stays flat.

    python -m benchmarks.slime_handover [--url postgresql+asyncpg://...] [--calls 1000] [--short]

First a batch of 256 turns of 8k tokens with top-64 teacher scores is handed over several times,
from the store's lease to merged rows and their carriers (and, if slime is installed, on through its
samples and the convert hook). Then many small batches are handed over, each marked trained by a
checkpoint, while the process's resident memory is recorded. It uses a database of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib.util
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import asyncpg
import numpy as np
import psutil
from sqlalchemy.engine import make_url

from records.config import StoreConfig
from records.names import DropReason, TurnState, TurnType
from records.store import Store
from records.training.share import LessonShares, Share
from records.types import CapturedTurn, Score, TurnRecord, Verdict, VersionSpan
from rollout_bridge.config import RendererConfig
from rollout_bridge.engine.config import EngineClientConfig
from rollout_bridge.slime.host import TurnHost
from rollout_bridge.slime.needs import SampleNeeds
from rollout_bridge.slime.probes import ProbePlan
from rollout_bridge.slime.rows import TrainRow, train_rows
from rollout_bridge.slime.settings import HandoverConfig, SlimeSettings

T = TypeVar("T")

VOCABULARY = 150_000
WORKER = "benchmark"
"""Owner of the claims with which turns are made ready."""
GROUP = 32
"""Turns that are made ready at a time."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed and memory of handing turns to slime.")
    parser.add_argument("--url", default="postgresql+asyncpg://postgres@127.0.0.1:5432/test")
    parser.add_argument("--turns", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=8192, help="of prompt and response together")
    parser.add_argument("--response", type=int, default=1024, help="tokens with teacher scores")
    parser.add_argument("--top-k", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--short", action="store_true", help="a one-minute check for developers")
    args = parser.parse_args()
    if args.short:
        args.turns, args.tokens, args.response = 32, 2048, 256
        args.repeats, args.calls = 3, 60
    args.version = 1
    database = f"handover_{uuid4().hex}"
    asyncio.run(_execute(args.url, f"CREATE DATABASE {database}"))
    url = make_url(args.url).set(database=database).render_as_string(hide_password=False)
    try:
        speed(args, StoreConfig(url=url))
        memory(args, StoreConfig(url=url))
    finally:
        asyncio.run(_execute(args.url, f"DROP DATABASE {database} WITH (FORCE)"))


def speed(args: Namespace, config: StoreConfig) -> None:
    """Seconds to hand one big batch over; the same turns each time, returned in between."""
    on_store(config, lambda store: make_ready(store, args, args.turns))
    seconds: list[tuple[float, float, float]] = []
    size = 0
    with tempfile.TemporaryDirectory() as folder:
        for job in range(args.repeats):
            # A new job finds only its start weights: what was handed over is ready again.
            host = TurnHost(_settings(Path(folder), config, args.turns, first_version=2 + 2 * job))
            host.resume(-1)
            started, cpu_before = time.perf_counter(), time.process_time()
            rows = handed_over(host, 0, args.turns)
            handed, cpu_s = time.perf_counter(), time.process_time() - cpu_before
            size = converted(rows)
            seconds.append((handed - started, time.perf_counter() - handed, cpu_s))
            host.close()
            del rows
        release(config)
    best, worst = min(seconds)[0], max(seconds)[0]
    print(
        f"handover of {args.turns} turns of {args.tokens} tokens, {args.response} of them with "
        f"top-{args.top_k} scores ({size / 2**20:.0f} MiB): "
        f"median {statistics.median(one for one, _, _ in seconds):.2f} s "
        f"(best {best:.2f}, worst {worst:.2f}, {args.repeats} times); of this process's CPU "
        f"{statistics.median(cpu_s for _, _, cpu_s in seconds):.2f} s"
    )
    if importlib.util.find_spec("slime"):
        convert_s = statistics.median(one for _, one, _ in seconds)
        print(f"samples and convert hook: median {convert_s:.2f} s")


def memory(args: Namespace, config: StoreConfig) -> None:
    """Resident memory over many calls on small batches, each marked trained."""
    turns, chunk = 8, 50
    process = psutil.Process()
    readings: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        first = 3 + 2 * args.repeats
        small = Namespace(tokens=512, response=64, top_k=args.top_k, version=first)
        host = TurnHost(_settings(Path(folder), config, turns, first_version=first))
        host.resume(-1)
        for call in range(args.calls):
            if call % chunk == 0:
                count = turns * min(chunk, args.calls - call)
                on_store(config, lambda store, count=count: make_ready(store, small, count))
            converted(handed_over(host, call, turns))
            host.checkpointed(call)
            if (call + 1) % max(args.calls // 20, 1) == 0:
                gc.collect()
                readings.append(process.memory_info().rss / 2**20)
        host.close()
    settled = readings[len(readings) // 4 :]
    slope = float(np.polyfit(np.arange(len(settled)), settled, 1)[0]) * 20 / args.calls * 1000
    print(
        f"memory over {args.calls} calls of {turns} turns: {readings[0]:.0f} MiB at first, "
        f"{settled[0]:.0f} after a quarter, {readings[-1]:.0f} at the end, "
        f"peak {max(readings):.0f}; trend after the first quarter {slope:+.1f} MiB per 1,000 calls"
    )


def handed_over(host: TurnHost, rollout_id: int, turns: int) -> list[TrainRow]:
    """One call, like that of the rollout function."""
    batch = host.next_batch(rollout_id)
    assert len(batch.samples) == turns, f"{len(batch.samples)} turns instead of {turns}"
    return train_rows(batch.samples, batch.version_gaps, min_rows=8)


def converted(rows: list[TrainRow]) -> int:
    """Pass rows through slime's samples and the convert hook, if installed; returns score bytes."""
    if importlib.util.find_spec("slime"):
        from rollout_bridge.slime.rollout import convert_samples, row_sample

        convert_samples(Namespace(), [row_sample(row, index) for index, row in enumerate(rows)])
    return sum(
        part.nbytes
        for row in rows
        for turn in row.carrier.turns
        for teaching in turn.sample.teachings
        for part in (teaching.topk_ids, teaching.topk_logprobs)
        if part is not None
    )


async def make_ready(store: Store, args: Namespace, count: int) -> None:
    """`count` turns, each in a session of its own, through judge and scoring to ready."""
    random = np.random.default_rng(0)
    for part in range(0, count, GROUP):
        group = range(part, min(part + GROUP, count))
        await asyncio.gather(*(_record(store, args, random, number) for number in group))
    for commit in (_judge, _score):
        state = TurnState.JUDGING if commit is _judge else TurnState.SCORING
        while turns := await store.claim(state, owner=WORKER, limit=GROUP, ttl_s=600):
            done = await asyncio.gather(*(commit(store, turn, args, random) for turn in turns))
            assert all(done)


async def _judge(
    store: Store, turn: TurnRecord, args: Namespace, random: np.random.Generator
) -> bool:
    verdict = Verdict(
        turn_id=turn.turn_id, votes=(), hint="In kelvin.", selection="longest", judge=WORKER
    )
    return await store.commit_verdict(WORKER, verdict, None)


async def _score(
    store: Store, turn: TurnRecord, args: Namespace, random: np.random.Generator
) -> bool:
    length, shape = len(turn.response_ids), (len(turn.response_ids), args.top_k)
    hint = random.integers(0, VOCABULARY, 40).astype(np.int32)
    score = Score(
        turn_id=turn.turn_id,
        hint="In kelvin.",
        teacher="start",
        teacher_version="0",
        hinted_prompt_ids=np.concatenate([turn.prompt_ids[:-4], hint, turn.prompt_ids[-4:]]),
        teacher_logprobs=_logprobs(random, (length,)),
        latency_s=0.1,
        topk_ids=random.integers(0, VOCABULARY, shape).astype(np.int32),
        topk_logprobs=_logprobs(random, shape),
    )
    return await store.commit_scores(WORKER, [score])


async def _record(store: Store, args: Namespace, random: np.random.Generator, number: int) -> None:
    turn_id = uuid4().hex
    session_id = await store.ensure_session(scope=WORKER, external_id=None)
    prompt = random.integers(0, VOCABULARY, args.tokens - args.response).astype(np.int32)
    turn = CapturedTurn(
        turn_id=turn_id,
        session_id=session_id,
        parent_turn_id=None,
        turn_type=TurnType.MAIN,
        messages=[{"role": "user", "content": f"{number}: how warm is it?"}],
        tools=[],
        response={"role": "assistant", "content": "70 F"},
        prompt_ids=prompt,
        response_ids=random.integers(0, VOCABULARY, args.response).astype(np.int32),
        rollout_logprobs=_logprobs(random, (args.response,)),
        token_parent_id=None,
        num_shared_ids=0,
        sampling={"temperature": 1.0},
        distribution_modified=None,
        version_spans=(VersionSpan(version=args.version, start=0, end=args.response),),
        finish_reason="stop",
        latency_s=1.0,
    )
    await store.record_turn(turn, scope=WORKER)
    await store.set_next_state(turn_id, [{"role": "user", "content": "In kelvin, please."}])


def _logprobs(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return -random.exponential(size=shape).astype(np.float32)


def _settings(folder: Path, config: StoreConfig, turns: int, first_version: int) -> SlimeSettings:
    return SlimeSettings(
        run_folder=folder,
        store=config,
        handover=HandoverConfig(max_wait_s=600.0, poll_interval_s=0.01),
        batch_size=turns,
        epochs_per_batch=1,
        max_staleness=10**6,
        hold_s=None,
        lease_ttl_s=3600.0,
        share=Share(),
        rehearsal=None,
        lesson_shares=LessonShares(),
        is_pipelined=True,
        is_guarded=False,
        rollback=None,
        first_version=first_version,
        needs=SampleNeeds(teacher=True, reward=False, compared=False, top_k=0),
        min_rows=8,
        # Only `TurnHost.probes` reads it, which nothing here calls.
        probes=ProbePlan(
            model="",
            vocab_size=None,
            renderer=RendererConfig(),
            client=EngineClientConfig(),
            seed=0,
            bound=1.0,
        ),
        save_folder=folder,
        is_async_save=False,
    )


def release(config: StoreConfig) -> None:
    """Release the leases of jobs that ended, and drop their turns."""

    async def drop(store: Store) -> None:
        await store.reconcile([])
        for sample in await store.lease(owner=WORKER, count=await store.ready_count(), ttl_s=60):
            await store.drop(WORKER, sample.turn_id, DropReason.STALE)

    on_store(config, drop)


def on_store(config: StoreConfig, work: Callable[[Store], Awaitable[T]]) -> T:
    """The result of `work` on a store that is open meanwhile."""

    async def run() -> T:
        async with await Store.open(config) as store:
            return await work(store)

    return asyncio.run(run())


async def _execute(url: str, statement: str) -> None:
    parsed = make_url(url).set(drivername="postgresql")
    connection = await asyncpg.connect(parsed.render_as_string(hide_password=False))
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


if __name__ == "__main__":
    main()
