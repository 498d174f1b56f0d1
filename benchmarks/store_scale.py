"""What the store and its pages cost as it grows.

    python -m benchmarks.store_scale --turns 1000 32000 512000 [--url postgresql+asyncpg://...]
        [--only PART_OF_A_NAME ...] [--out FILE.json]

A template of 500 turns goes through the whole life of a turn. The store then doubles by SQL, with
ids and times of their own, until it has so many turns (rounded up to a doubling of 500), and 100
live turns are added to a copy of it on which everything is measured: medians in milliseconds, the
first call left out. Pages are requests to the proxy's process, and of 20 the p95 is printed, too;
`first reconcile` and `verify` are single calls. The last column compares the largest with the
smallest store.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
import numpy as np
from sqlalchemy import Connection, text
from sqlalchemy.engine import make_url

from benchmarks.own_agent.table import markdown
from benchmarks.proxy_processes import LAB_MODEL, percentile, served
from benchmarks.scripted_engine import Script
from benchmarks.store_writes import next_turn, postgresql_database, score_of, verdict_of
from opd.report.terminal.status import status_line
from records.care.housekeeping import Housekeeping
from records.care.verify import verify_database
from records.config import StoreConfig
from records.names import DropReason, TurnState
from records.reading.browsing import Wanted
from records.search import parts
from records.store import Store
from records.training.step_results import SampleResult, TokenFigures
from records.types import CapturedTurn, PolicyVersion
from rollout_bridge.config import RendererConfig

SCOPE = "bench"
SESSIONS, TURNS = 50, 10
LIVE_SESSIONS = 10
CALLS, PAGE_CALLS = 7, 20
OWNER = "benchmark"
PREFIXES = "ghijklmnopqrstuvwxyz"
"""Letters that no id of the template begins with."""
_IDS: dict[str, tuple[str, ...]] = {
    "policy_versions": ("manifest_hash",),
    "sessions": ("session_id", "external_id"),
    "message_nodes": ("node_id", "parent_id"),
    "turns": (
        *("turn_id", "session_id", "parent_turn_id", "prompt_node_id", "response_node_id"),
        *("fingerprint", "calls_key"),
    ),
    "turn_texts": ("turn_id",),
    "turn_tokens": ("turn_id", "token_parent_id"),
    "verdicts": ("turn_id",),
    "votes": ("turn_id",),
    "scores": ("turn_id",),
    "samples": ("turn_id",),
}
"""Tables that are doubled, parents first, and their columns with ids."""
_VERSIONS = ("version", "parent_version", "trained_version")
_TIMES = ("created_at", "updated_at", "last_seen", "closed_at")


@dataclass(slots=True, kw_only=True)
class Clock:
    """Milliseconds by operation, with so many turns in the store."""

    turns: int
    only: Sequence[str]
    ms: dict[str, float] = field(default_factory=dict)

    async def __call__(
        self, name: str, do: Callable[[], Awaitable[Any]], calls: int = CALLS, skip: int = 1
    ) -> None:
        """Measure an operation, unless others alone are wanted."""
        if seconds := await self._seconds(name, do, calls, skip):
            self.ms[name] = 1e3 * statistics.median(seconds)

    async def page(self, name: str, do: Callable[[], Awaitable[Any]]) -> None:
        """Measure a page, its slowest answers, too."""
        if seconds := await self._seconds(name, do, PAGE_CALLS, 1):
            self.ms[name] = 1e3 * statistics.median(seconds)
            self.ms[f"{name}, p95"] = 1e3 * percentile(seconds, 0.95)

    async def _seconds(
        self, name: str, do: Callable[[], Awaitable[Any]], calls: int, skip: int
    ) -> list[float]:
        if self.only and not any(part in name for part in self.only):
            return []
        seconds = []
        for _ in range(calls + skip):
            begun = time.perf_counter()
            await do()
            seconds.append(time.perf_counter() - begun)
        return seconds[skip:]


def main() -> None:
    """Fill, measure, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, nargs="+", default=[1_000, 32_000, 512_000])
    parser.add_argument("--url", help="a PostgreSQL server; default is SQLite")
    parser.add_argument("--only", nargs="+", default=[], help="operations with this in their name")
    parser.add_argument("--folder", type=Path, help="where SQLite files go (default: temporary)")
    parser.add_argument("--out", type=Path, help="also write the figures here, as JSON")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder, ExitStack() as stack:
        results = list(_sizes(given, Path(folder), stack))
    if given.out:
        given.out.write_text(json.dumps({str(one.turns): one.ms for one in results}, indent=1))
    names = list(dict.fromkeys(name for one in results for name in one.ms))
    rows = [
        (
            name,
            *(f"{one.ms[name]:,.1f}" for one in results),
            f"{results[-1].ms[name] / results[0].ms[name]:.1f} x",
        )
        for name in names
    ]
    sizes = [f"{one.turns:,} turns" for one in results]
    print(markdown(("operation, ms", *sizes, "last / first"), rows))


def _sizes(given: argparse.Namespace, folder: Path, stack: ExitStack) -> Iterator[Clock]:
    full = _database(given.url, folder, stack)
    asyncio.run(_template(full))
    number = SESSIONS * TURNS
    for wanted in sorted(given.turns):
        while number < wanted:
            begun = time.monotonic()
            asyncio.run(_double(full, number))
            number *= 2
            print(f"{number:,} turns: {time.monotonic() - begun:.1f} s", flush=True)
        copy = _copy(full, given.url, folder, stack)
        yield _measure(copy, number, given.only)


def _database(url: str | None, folder: Path, stack: ExitStack) -> StoreConfig:
    """A new database; one on a server is dropped with the stack."""
    if url is None:
        return StoreConfig.sqlite(folder / f"{uuid4().hex}.db")
    name = f"store_scale_{uuid4().hex[:12]}"
    asyncio.run(postgresql_database(url, "CREATE DATABASE", name))
    stack.callback(lambda: asyncio.run(postgresql_database(url, "DROP DATABASE", name)))
    return _on_server(url, name, folder)


def _on_server(url: str, name: str, folder: Path) -> StoreConfig:
    address = make_url(url).set(database=name).render_as_string(hide_password=False)
    return StoreConfig(url=address, spill_folder=folder / name)


def _copy(full: StoreConfig, url: str | None, folder: Path, stack: ExitStack) -> StoreConfig:
    if url is None:
        copy = folder / f"{uuid4().hex}.db"
        shutil.copy(full.sqlite_path or "", copy)
        return StoreConfig.sqlite(copy)
    name, source = f"store_scale_{uuid4().hex[:12]}", make_url(full.url).database
    asyncio.run(postgresql_database(url, "CREATE DATABASE", f'{name}" TEMPLATE "{source}'))
    stack.callback(lambda: asyncio.run(postgresql_database(url, "DROP DATABASE", name)))
    return _on_server(url, name, folder)


async def _template(config: StoreConfig) -> None:
    """500 turns: of each session eight trained, one dropped by the judge, one without a next."""
    rng = np.random.default_rng(0)
    async with await Store.open(config) as store:
        sessions = [await _conversation(store, rng, TURNS) for _ in range(SESSIONS)]
        judged = set()
        while turns := await store.claim(TurnState.JUDGING, owner=OWNER, limit=64, ttl_s=600.0):
            for turn in turns:
                if any(turn.turn_id == one[-2].turn_id for one in sessions):
                    await store.drop(OWNER, turn.turn_id, DropReason.NO_HINT)
                    continue
                judged.add(turn.turn_id)
                await store.commit_verdict(OWNER, verdict_of(turn), None)
        while turns := await store.claim(TurnState.SCORING, owner=OWNER, limit=64, ttl_s=600.0):
            for turn in turns:
                await store.commit_scores(OWNER, [score_of(turn)])
        for number in range(1, len(judged) // 8 + 1):
            await take_step(store, number, 8)
        for one in sessions:
            await store.close_session(one[0].session_id, "ended")
        while await store.index_texts(50):
            pass
        if config.is_sqlite:
            await store.read(_truncate_log)


async def _conversation(store: Store, rng: np.random.Generator, turns: int) -> list[CapturedTurn]:
    session_id = await store.ensure_session(scope=SCOPE, external_id=uuid4().hex)
    said: list[CapturedTurn] = []
    for _ in range(turns):
        turn = next_turn(rng, session_id, said[-1] if said else None)
        await store.record_turn(turn, scope=SCOPE)
        if said:
            await store.set_next_state(said[-1].turn_id, turn.messages[-1:])
        said.append(turn)
    return said


async def take_step(store: Store, number: int, count: int) -> list[str]:
    """Lease and commit a step on `count` turns; returns their ids."""
    samples = await store.lease(owner=OWNER, count=count, ttl_s=600.0)
    version = PolicyVersion(
        version=number,
        parent_version=number - 1,
        checkpoint=f"step_{number:06d}",
        manifest_hash=f"manifest-{number}",
        created_at=time.time(),
    )
    results = [
        SampleResult(
            turn_id=one.turn_id,
            staleness=0,
            advantage_mean=0.0,
            advantage_abs_max=0.5,
            advantages=np.zeros(len(one.response_ids), dtype=np.float32),
            figures=_figures(len(one.response_ids)),
        )
        for one in samples
    ]
    await store.commit_step(version=version, results=results)
    return [one.turn_id for one in samples]


def _figures(number: int) -> TokenFigures:
    """As of a step whose weights are those of whole turns."""
    zeros, ones = np.zeros(number, dtype=np.float32), np.ones(number, dtype=np.float32)
    return TokenFigures(log_ratios=zeros, weights=ones, entropies=ones, engine_gaps=zeros)


async def _double(config: StoreConfig, number: int) -> None:
    letter = PREFIXES[(number // (SESSIONS * TURNS)).bit_length() - 1]
    async with await Store.open(config.patient()) as store:
        await store.write(_double_op, letter=letter, later_s=float(number))
        if config.is_sqlite:
            await store.read(_truncate_log)


def _double_op(connection: Connection, letter: str, later_s: float) -> None:
    """Every row once more, with this letter before its ids and later times."""
    stride = connection.execute(text("SELECT max(number) FROM turn_texts")).scalar_one()
    steps = connection.execute(text("SELECT max(version) FROM policy_versions")).scalar_one()
    values = {"letter": letter, "later": later_s, "stride": stride, "steps": steps}
    is_sqlite = connection.dialect.name == "sqlite"
    tables = _IDS if is_sqlite else {**_IDS, "turn_words": ()}
    for table, ids in tables.items():
        columns = _columns(connection, table)
        copied = [_copied(column, ids) for column in columns]
        statement = text(
            f"INSERT INTO {table}({', '.join(columns)}) SELECT {', '.join(copied)} FROM {table}"
        )
        if table == "message_nodes":
            # All sessions of an agent follow the same system prompt.
            under = "CASE WHEN depth > 1 THEN :letter || parent_id ELSE parent_id END"
            said = statement.text.replace(":letter || parent_id", under)
            statement = text(f"{said} WHERE depth > 0")
        used = {name: one for name, one in values.items() if f":{name}" in statement.text}
        connection.execute(statement, used)
    if is_sqlite:
        _double_words(connection, stride)
    else:
        # As the server does by itself a minute later.
        connection.execute(text("ANALYZE"))
        sequence = "pg_get_serial_sequence('turn_texts', 'number')"
        connection.execute(text(f"SELECT setval({sequence}, {2 * stride})"))


def _double_words(connection: Connection, stride: int) -> None:
    """The rows of SQLite's index of texts once more."""
    size = parts.PART_NUMBERS
    for part in parts.parts(connection):
        first, last = part * size + stride, min((part + 1) * size - 1, stride) + stride
        for later in range(first // size, last // size + 1):
            table, number = parts.made(connection, later), "rowid + :stride"
            copy = text(
                f"INSERT INTO {table}(rowid, words) SELECT {number}, words "
                f"FROM {parts.table_of_part(part)} "
                f"WHERE rowid <= :stride AND {number} >= :low AND {number} < :high"
            )
            low = later * size
            connection.execute(copy, {"stride": stride, "low": low, "high": low + size})


def _columns(connection: Connection, table: str) -> list[str]:
    names = connection.execute(text(f"SELECT * FROM {table} LIMIT 0")).keys()
    return list(names)


def _copied(column: str, ids: Sequence[str]) -> str:
    if column in ids:
        return f":letter || {column}"
    if column in _TIMES:
        return f"{column} + :later"
    if column in _VERSIONS:
        return f"{column} + :steps"
    return f"{column} + :stride" if column == "number" else column


def _truncate_log(connection: Connection) -> None:
    connection.execute(text("PRAGMA wal_checkpoint(TRUNCATE)")).all()


def _measure(config: StoreConfig, number: int, only: Sequence[str]) -> Clock:
    clock = Clock(turns=number, only=only)
    rng = np.random.default_rng(number)
    live = asyncio.run(_store_operations(config, rng, clock))
    script = Script(reply_ids=(1,), texts=("a",), first_s=0.0, pace_s=0.0)
    with served(script, str(LAB_MODEL), RendererConfig(), store=config) as there:
        asyncio.run(_pages(there.proxy_url, live[0][0], clock))
    asyncio.run(_rare_operations(config, live, clock))
    print(f"{number:,} turns: measured", flush=True)
    return clock


async def _store_operations(
    config: StoreConfig, rng: np.random.Generator, clock: Clock
) -> list[list[CapturedTurn]]:
    """What happens with every request, turn and step; returns the live sessions."""
    async with await Store.open(config) as store:
        live = [await _conversation(store, rng, TURNS) for _ in range(LIVE_SESSIONS)]
        await store.index_texts(LIVE_SESSIONS * TURNS)
        await _often(store, live, rng, clock)
    return live


async def _often(
    store: Store, live: list[list[CapturedTurn]], rng: np.random.Generator, clock: Clock
) -> None:
    since = time.time() - 86_400.0

    async def unknown() -> None:
        await store.turns_by_response_node(SCOPE, [uuid4().hex for _ in range(20)])
        await store.turns_by_fingerprint(SCOPE, uuid4().hex, since, 8)
        await store.turns_by_calls(SCOPE, uuid4().hex, since, 8)

    await clock("look-up of a history that links nowhere", unknown)
    await clock(
        "first request of a session", lambda: store.recent_summaries(SCOPE, ["x"], since, 8)
    )
    await clock("record a turn", lambda: _conversation(store, rng, 1))

    async def judge() -> None:
        turns = await store.claim(TurnState.JUDGING, owner=OWNER, limit=4, ttl_s=600.0)
        for turn in turns:
            await store.commit_verdict(OWNER, verdict_of(turn), None)

    async def score() -> None:
        turns = await store.claim(TurnState.SCORING, owner=OWNER, limit=4, ttl_s=600.0)
        for turn in turns:
            await store.commit_scores(OWNER, [score_of(turn)])

    async def step() -> None:
        if not await take_step(store, await store.next_version(), 2):
            raise SystemExit("no turn was ready")

    await clock("claim and judge 4 turns", judge)
    await clock("claim and score 4 turns", score)
    await clock("lease, train and commit 2 turns", step)

    async def sums() -> None:
        await store.counts()
        await store.drops()
        await store.vote_summary()

    await clock("sums after a step", sums)
    await clock("status line", lambda: status_line(store))
    await clock("report's examples", lambda: store.example_turns(3))
    named = live[0][0].session_id
    await clock("doctor on a session", lambda: store.sessions_named(named))
    await clock("newest version", store.highest_version)
    await clock("index the text of a turn", lambda: _indexed(store, rng))
    for name, phrases in (("common", ["answer"]), ("rare", [live[0][0].turn_id])):
        await clock(
            f"search a {name} word",
            lambda phrases=phrases: store.found_page(
                None, wanted=Wanted(), phrases=phrases, after=None, limit=50
            ),
        )


async def _indexed(store: Store, rng: np.random.Generator) -> None:
    await _conversation(store, rng, 1)
    await store.index_texts(50)


async def _rare_operations(
    config: StoreConfig, live: list[list[CapturedTurn]], clock: Clock
) -> None:
    """What happens now and then."""
    sessions = iter([one[0].session_id for one in live])
    async with await Store.open(config) as store:
        keeper = Housekeeping(store, time.time)
        await clock(
            "forget a session", lambda: keeper.delete([next(sessions)], "forget", patience_s=0.0), 3
        )
        chain = await _chain(store)
        # Nothing was compared before; from then on, only what is newer is.
        await clock("first reconcile", lambda: store.reconcile(chain), 1, 0)
        await clock("reconcile at start", lambda: store.reconcile(chain))
    await clock("verify", lambda: verify_database(config), 1, 0)


async def _chain(store: Store) -> list[tuple[PolicyVersion, list[str]]]:
    """What the manifests would say: each version with the turns that it trained."""
    trained: dict[int, list[str]] = defaultdict(list)
    keeper = Housekeeping(store, time.time)
    for turn_id, version in (await keeper.trained_turns()).items():
        trained[version].append(turn_id)
    versions = await keeper.versions()
    return [(one, trained[number]) for number, one in sorted(versions.items()) if number > 0]


async def _pages(proxy_url: str, turn: CapturedTurn, clock: Clock) -> None:
    """Requests to the proxy's process."""
    paths = {
        "Now": "/ui/now",
        "Sessions": "/ui/sessions",
        "Sessions, a rare state": "/ui/sessions?state=ready",
        "Sessions, a common word": "/ui/sessions?text=answer",
        "Sessions, a rare word": f"/ui/sessions?text={turn.turn_id}",
        "a session": f"/ui/sessions/{turn.session_id}",
        "a turn": f"/ui/turns/{turn.turn_id}",
        "Memory": "/ui/memory",
        "Review": "/ui/review",
    }
    async with aiohttp.ClientSession(proxy_url) as session:

        async def get(path: str) -> None:
            async with session.get(path) as reply:
                reply.raise_for_status()
                await reply.read()

        for name, path in paths.items():
            await clock.page(f"page: {name}", lambda path=path: get(path))


if __name__ == "__main__":
    main()
