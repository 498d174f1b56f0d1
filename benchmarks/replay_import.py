"""How fast recorded sessions are imported, where the time goes, and how much memory it takes.

    python -m benchmarks.replay_import --sessions 100000 [--url postgresql+asyncpg://...]

Sessions of a few turns, no two with the same texts, are written to a temporary file and imported
like in a replay, into SQLite and, with --url, into PostgreSQL; each in a process of its own, one
after another. Memory is the process's largest resident size after 10% of the sessions and at the
end: it must not grow with their number. Reading alone, and reading with rendering, are timed on
some of the sessions; the rest of the import's time is waiting for writes. On a busy machine compare
the processor time, which is this process's own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from sqlalchemy import Connection, func, select
from sqlalchemy.engine import make_url

from benchmarks.recorded_sessions import import_settings, replay_config
from benchmarks.store_writes import postgresql_database
from opd.replay.importing import ImportSettings, prepare_session
from opd.replay.recordings.reading import read_recordings
from opd.replay.recordings.recorded import RecordedSession
from opd.replay.taking_in import ImportReport, take_in
from records.config import StoreConfig
from records.privacy.redaction import Redactor
from records.store import Store
from records.tables.models import Base
from rollout_bridge.rendering.rendering import Rendering

_LOOK_EVERY = 50
_STATM = Path("/proc/self/statm")
_PAGE_KIB = 4


@dataclass(slots=True, kw_only=True)
class Figures:
    """Figures of one import. KiB are None if the system does not report a process's memory."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    turns: int = 0
    new: int = 0
    rows: int = 0
    kib_at_10_percent: int | None = None
    kib_largest: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Seconds per session: reading it, and making its rows."""

    read: float
    render: float


def main() -> None:
    """Print a block for each database."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=100_000)
    parser.add_argument("--turns", type=int, default=3, help="of a session")
    parser.add_argument("--timed", type=int, default=500, help="sessions to read and render alone")
    parser.add_argument("--url", help="a PostgreSQL server, in addition to SQLite")
    parser.add_argument("--folder", type=Path, help="for the files (default: temporary)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        file = folder / "sessions.jsonl"
        write_sessions(file, arguments.sessions, arguments.turns)
        size = file.stat().st_size / 2**20
        print(f"{arguments.sessions:,} sessions of {arguments.turns} turns, {size:,.1f} MiB")
        context = multiprocessing.get_context("spawn")
        with context.Pool(1, maxtasksperchild=1) as pool:
            parts = pool.apply(parts_of, (file, arguments.timed, folder))
            sqlite = pool.apply(import_once, (_sqlite(folder), file, arguments.sessions, folder))
            report("SQLite", sqlite, arguments.sessions, parts)
            if arguments.url:
                database = f"replay_import_{uuid4().hex[:12]}"
                asyncio.run(postgresql_database(arguments.url, "CREATE DATABASE", database))
                try:
                    url = make_url(arguments.url).set(database=database)
                    whole = url.render_as_string(hide_password=False)
                    figures = pool.apply(import_once, (whole, file, arguments.sessions, folder))
                    report("PostgreSQL", figures, arguments.sessions, parts)
                finally:
                    asyncio.run(postgresql_database(arguments.url, "DROP DATABASE", database))


def _sqlite(folder: Path) -> str:
    return StoreConfig.sqlite(folder / "records.db").url


def write_sessions(file: Path, count: int, turns: int) -> None:
    """Write sessions in OpenAI's chat format, drawn with a fixed seed."""
    draw = random.Random(0)
    with file.open("w", encoding="utf-8") as out:
        for number in range(count):
            session = {"session_id": f"session-{number}", "messages": list(_messages(draw, turns))}
            out.write(json.dumps(session) + "\n")


def _messages(draw: random.Random, turns: int) -> Iterator[dict[str, str]]:
    yield {"role": "system", "content": "You are a helpful assistant. Answer briefly."}
    for _ in range(turns):
        yield {"role": "user", "content": _text(draw, 20)}
        yield {"role": "assistant", "content": _text(draw, 30)}
    yield {"role": "user", "content": _text(draw, 6)}


_WORDS = tuple(
    f"{start}{end}"
    for start in ("wea", "tra", "ho", "ri", "mor")
    for end in ("ther", "in", "tel", "ver")
)


def _text(draw: random.Random, words: int) -> str:
    return " ".join(draw.choices(_WORDS, k=words)) + f" {draw.randrange(10**9)}."


def parts_of(file: Path, count: int, folder: Path) -> Parts:
    """Seconds per session, over the first `count`, without a store."""
    rendering, settings = _prepared(folder)
    redactor = Redactor(StoreConfig.sqlite(folder / "none.db").redaction)
    begun = time.perf_counter()
    sessions = list(_first(file, count))
    read = time.perf_counter()
    for session in sessions:
        prepare_session(session, rendering, redactor, settings, 0.0)
    rendered = time.perf_counter()
    return Parts(read=(read - begun) / len(sessions), render=(rendered - read) / len(sessions))


def _first(file: Path, count: int) -> Iterator[RecordedSession]:
    for item in read_recordings([file]):
        if isinstance(item, RecordedSession):
            yield item
            count -= 1
        if count == 0:
            return


def _prepared(folder: Path) -> tuple[Rendering, ImportSettings]:
    config = replay_config(folder)
    rendering = Rendering.load(config.model, config.renderer)
    return rendering, import_settings(config, rendering)


def import_once(url: str, file: Path, count: int, folder: Path) -> Figures:
    """The whole import into an empty database."""
    return asyncio.run(_import(url, file, count, folder))


async def _import(url: str, file: Path, count: int, folder: Path) -> Figures:
    rendering, settings = _prepared(folder)
    figures = Figures()

    def look(report: ImportReport) -> None:
        if report.num_sessions % _LOOK_EVERY and report.num_sessions != count:
            return
        now = resident_kib()
        if now is None or report.num_sessions < count / 10:
            return
        if figures.kib_at_10_percent is None:
            figures.kib_at_10_percent = figures.kib_largest = now
        figures.kib_largest = max(now, figures.kib_largest or 0)

    async with await Store.open(StoreConfig(url=url)) as store:
        begun = time.process_time()
        done = await take_in(store, rendering, settings, [file], [], folder, look)
        figures.cpu_seconds = time.process_time() - begun
        figures.rows = await store.writer.run(_rows)
    if done.num_rendered != done.num_turns or done.num_new != done.num_turns:
        raise SystemExit(f"not everything was imported: {done.as_dict()}")
    figures.seconds, figures.turns, figures.new = done.seconds, done.num_turns, done.num_new
    return figures


def _rows(connection: Connection) -> int:
    counts = (
        connection.scalar(select(func.count()).select_from(table))
        for table in Base.metadata.sorted_tables
    )
    return sum(count or 0 for count in counts)


def resident_kib() -> int | None:
    """This process's resident memory now; None if the system does not report it."""
    if not _STATM.exists():
        return None
    return int(_STATM.read_text().split()[1]) * _PAGE_KIB


def report(name: str, figures: Figures, sessions: int, parts: Parts) -> None:
    """Print one block."""
    seconds = figures.seconds
    print(
        f"{name}: {seconds:,.1f} s; {sessions / seconds:,.0f} sessions/s, "
        f"{figures.turns / seconds:,.0f} turns/s, {figures.rows / seconds:,.0f} rows/s"
    )
    each = seconds / sessions
    waited = each - parts.read - parts.render
    print(
        f"  a session: {1e3 * each:.2f} ms; reading {1e3 * parts.read:.2f}, rendering "
        f"{1e3 * parts.render:.2f}, waiting for writes and all else {1e3 * waited:.2f}; "
        f"{1e3 * figures.cpu_seconds / sessions:.2f} ms of processor time"
    )
    if figures.kib_largest is None or figures.kib_at_10_percent is None:
        print("  memory: not reported by the system", flush=True)
        return
    grown = (figures.kib_largest - figures.kib_at_10_percent) / 1024
    print(
        f"  memory: {figures.kib_at_10_percent / 1024:,.0f} MiB after 10% of the sessions, "
        f"at most {grown:,.1f} MiB more after that",
        flush=True,
    )


if __name__ == "__main__":
    main()
