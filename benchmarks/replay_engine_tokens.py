"""Engine tokens that a replay computes for votes and scores, compared with computing every prompt.

    python -m benchmarks.replay_engine_tokens [FILE] [--votes FILE] [--sessions 4] [--judged 1]

The replay's own judge and scoring workers run on a temporary store, with embedded engines. Counters
between workers and engines read each reply: prompt tokens (for a score, also the response's) minus
cached ones are computed tokens. One session after another:

1. Scores of the turns to which recorded votes give a hint: by the policy (prompt and response) and
   by the teacher (hinted prompt and response). Also printed are the tokens that no earlier request
   of this or an earlier session contained: the least that any cache can compute.
2. Votes (m for each turn) on the first `--judged` sessions, as if no votes were recorded. One
   prompt per turn is the share of an engine that computes the prompt of a turn's votes once.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.recorded_sessions import (
    SESSIONS,
    distinct_tokens,
    import_settings,
    replay_config,
)
from benchmarks.shared_prefill import Tap, embedded_engine
from judge.config import JudgeConfig
from judge.worker import JudgeWorker
from opd.replay.importing import SCOPE, prepare_session
from opd.replay.recordings.reading import read_recordings
from opd.replay.recordings.recorded import RecordedSession
from opd.replay.recordings.votes import Votes, read_votes
from opd.replay.run_replay import LAB_MODEL
from opd.run.config import RunConfig
from records.config import StoreConfig
from records.names import TurnState
from records.privacy.redaction import Redactor
from records.reading.replaying import PreparedSession
from records.store import Store
from records.types import Ids
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.rendering.rendering import Rendering
from rollout_bridge.scoring.policy_scores import PolicyScorer
from rollout_bridge.scoring.scoring import ScoringWorker


@dataclass(kw_only=True)
class Tokens:
    """Sum of the tokens of some requests, how many were computed, and the least possible."""

    asked: int = 0
    computed: int = 0
    least: int = 0

    def add(self, other: Tokens) -> None:
        """Sum of both."""
        self.asked += other.asked
        self.computed += other.computed
        self.least += other.least

    def words(self, name: str) -> str:
        """One cell of the table."""
        if self.asked == 0:
            return "nothing asked"
        return (
            f"{self.computed:9,} computed of {self.asked:9,}: {self.computed / self.asked:6.1%}"
            f" ({name} {self.least / self.asked:.1%})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A session to replay, as rows, and the votes on it."""

    rows: PreparedSession
    votes: tuple[Votes, ...]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?", type=Path, default=SESSIONS)
    parser.add_argument("--votes", type=Path, help="default: next to FILE, *_votes.jsonl")
    parser.add_argument("--model", type=Path, default=LAB_MODEL)
    parser.add_argument("--sessions", type=int, default=4, help="most sessions to score")
    parser.add_argument("--judged", type=int, default=1, help="sessions to vote on")
    parser.add_argument("--votes-per-turn", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=8, help="of a vote")
    arguments = parser.parse_args()
    votes = arguments.votes or arguments.file.with_name(
        arguments.file.name.replace("_sessions", "_votes")
    )
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        config = replay_config(folder, arguments.model)
        rendering = Rendering.load(config.model, config.renderer)
        most = max(arguments.sessions, arguments.judged)
        sessions = recorded_sessions(arguments.file, votes, config, rendering, most)
        urls = [opened.enter_context(embedded_engine(config.model)) for _ in range(2)]
        scored = sessions[: arguments.sessions]
        if scored:
            asyncio.run(measure_scores(scored, config, rendering, folder, *urls))
        judged = sessions[: arguments.judged]
        if judged:
            judge = config.judge.model_copy(
                update={"votes": arguments.votes_per_turn, "max_tokens": arguments.max_tokens}
            )
            asyncio.run(measure_votes(judged, judge, rendering, folder, urls[1]))


def recorded_sessions(
    file: Path, votes: Path, config: RunConfig, rendering: Rendering, count: int
) -> list[Recorded]:
    """The first `count` sessions that have votes."""
    of_session: dict[str, list[Votes]] = {}
    for one in read_votes(votes):
        if isinstance(one, Votes):
            of_session.setdefault(one.session_id, []).append(one)
    settings = import_settings(config, rendering)
    redactor = Redactor(config.store.redaction)
    sessions: list[Recorded] = []
    for item in read_recordings([file]):
        if len(sessions) == count:
            break
        if not isinstance(item, RecordedSession) or item.session_id not in of_session:
            continue
        rows = prepare_session(item, rendering, redactor, settings, time.time()).rows
        if rows is not None:
            sessions.append(Recorded(rows=rows, votes=tuple(of_session[item.session_id])))
    return sessions


async def measure_scores(
    sessions: list[Recorded],
    config: RunConfig,
    rendering: Rendering,
    folder: Path,
    policy_url: str,
    teacher_url: str,
) -> dict[str, Tokens]:
    """Part 1: print a block per session, and the sums; returns the sums."""
    judge = config.judge.model_copy(update={"recorded_votes_only": True})
    totals = {"policy": Tokens(), "teacher": Tokens()}
    asked: dict[str, list[Ids]] = {name: [] for name in totals}
    async with (
        await Store.open(StoreConfig.sqlite(folder / "scored.db")) as store,
        tapped(policy_url, rendering) as (policy_tap, policy),
        tapped(teacher_url, rendering) as (teacher_tap, teacher),
    ):
        for session in sessions:
            await take_in(store, session, with_votes=True)
            await work(store, JudgeWorker(store, judge, "judge"))
            turns = await store.claim(TurnState.SCORING, owner="look", limit=10_000, ttl_s=60.0)
            await store.release("look", [turn.turn_id for turn in turns])
            worker = ScoringWorker(
                store, teacher, rendering, config.scoring, "scoring", policy=PolicyScorer(policy)
            )
            await work(store, worker)
            new: dict[str, list[Ids]] = {"policy": [], "teacher": []}
            for turn in turns:
                new["policy"].append(np.concatenate([turn.prompt_ids, turn.response_ids]))
                score = await store.score_of(turn.turn_id)
                if score is not None:
                    ids = np.concatenate([score.hinted_prompt_ids, turn.response_ids])
                    new["teacher"].append(ids)
            counted = {}
            for name, tap in (("policy", policy_tap), ("teacher", teacher_tap)):
                before = distinct_tokens(asked[name])
                asked[name] += new[name]
                counted[name] = taken(tap, distinct_tokens(asked[name]) - before)
            print(f"{session.rows.name}: {len(turns)} turns scored")
            for name, tokens in counted.items():
                print(f"  {name:8} {tokens.words('new')}", flush=True)
                totals[name].add(tokens)
    print("all scores")
    for name, tokens in totals.items():
        print(f"  {name:8} {tokens.words('new')}")
    both = Tokens()
    for tokens in totals.values():
        both.add(tokens)
    print(f"  both     {both.words('new')}", flush=True)
    return totals


async def measure_votes(
    sessions: list[Recorded],
    judge: JudgeConfig,
    rendering: Rendering,
    folder: Path,
    judge_url: str,
) -> list[Tokens]:
    """Part 2: print a block per session; returns the tokens of each."""
    counted = []
    async with await Store.open(StoreConfig.sqlite(folder / "judged.db")) as store:
        tap = Tap(judge_url)
        async with tap.served() as url:
            config = judge.model_copy(update={"base_url": f"{url}/v1"})
            for session in sessions:
                await take_in(store, session, with_votes=False)
                worker = JudgeWorker(store, config, "judge", count_tokens=rendering.count_tokens)
                begun = time.perf_counter()
                await work(store, worker)
                seconds = time.perf_counter() - begun
                # All votes of a turn have one prompt.
                tokens = taken(tap, tap.count.prompt // config.votes)
                counted.append(tokens)
                num_turns = len(session.rows.next_states)
                print(
                    f"{session.rows.name}: {config.votes} votes on {num_turns} turns, "
                    f"{seconds:.0f} s\n  votes    {tokens.words('one prompt per turn')}",
                    flush=True,
                )
    return counted


@asynccontextmanager
async def tapped(url: str, rendering: Rendering) -> AsyncIterator[tuple[Tap, EngineClient]]:
    """An engine's client, and the counter that its requests pass through."""
    tap = Tap(url)
    async with tap.served() as address:
        client = EngineClient(address, vocab_size=rendering.vocab_size)
        try:
            yield tap, client
        finally:
            await client.close()


def taken(tap: Tap, least: int) -> Tokens:
    """What the tap counted since the last call."""
    count = tap.count
    tap.count = type(count)()
    return Tokens(asked=count.prompt, computed=count.prompt - count.cached, least=least)


async def take_in(store: Store, session: Recorded, *, with_votes: bool) -> None:
    """Write a session to the store, like the import."""
    await store.import_session(session.rows)
    if with_votes:
        turns = await store.recorded_turns(SCOPE, session.rows.name)
        for one in session.votes:
            for turn_id in turns.get(one.position, ()):
                await store.import_votes(turn_id, one.texts)


async def work(store: Store, worker: JudgeWorker | ScoringWorker) -> None:
    """Run a worker until nothing waits for it."""
    stop = asyncio.Event()
    running = asyncio.create_task(worker.run(stop))
    while not running.done() and (await store.counts()).get(worker.state):
        await asyncio.sleep(0.05)
    stop.set()
    await running


if __name__ == "__main__":
    main()
