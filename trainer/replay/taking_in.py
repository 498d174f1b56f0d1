"""The first stage of a replay: files of recordings, and of votes, into the store."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from records.replaying import PreparedSession
from records.store import Store
from rollout_bridge.rendering import Rendering
from trainer.replay.importing import (
    SCOPE,
    ImportSettings,
    PreparedImport,
    prepare_session,
    session_key,
)
from trainer.replay.reading import read_recordings
from trainer.replay.recorded import ImportProblem, Problem, RecordedSession
from trainer.replay.votes import read_votes

PROBLEMS_FILE = "import_problems.jsonl"
_AT_ONCE = 16
"""Sessions that are written in one transaction, while the next ones are read."""


@dataclass(slots=True, kw_only=True)
class ImportReport:
    """What was read and what became of it. `problems` counts by reason."""

    formats: Counter[str] = field(default_factory=Counter)
    num_sessions: int = 0
    num_turns: int = 0
    num_rendered: int = 0
    num_new: int = 0
    num_tokens: int = 0
    problems: Counter[str] = field(default_factory=Counter)
    num_votes: int = 0
    num_votes_new: int = 0
    votes_without_turn: int = 0
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """For summary.json; shares of nothing are None."""
        return {
            "formats": dict(self.formats),
            "sessions": self.num_sessions,
            "turns": self.num_turns,
            "turns_rendered": self.num_rendered,
            "rendered_share": self.num_rendered / self.num_turns if self.num_turns else None,
            "turns_new": self.num_new,
            "tokens": self.num_tokens,
            "problems": dict(self.problems),
            "turns_with_votes": self.num_votes,
            "turns_with_new_votes": self.num_votes_new,
            "votes_without_turn": self.votes_without_turn,
            "seconds": self.seconds,
        }


async def take_in(
    store: Store,
    rendering: Rendering,
    settings: ImportSettings,
    recordings: Sequence[Path],
    votes: Sequence[Path],
    folder: Path,
    progress: Callable[[ImportReport], None],
) -> ImportReport:
    """Read everything into the store; each problem is a line of import_problems.jsonl.

    Nothing is taken in twice. Memory holds a few sessions at a time, however many there are.
    """
    started = time.monotonic()
    report = ImportReport()
    with (folder / PROBLEMS_FILE).open("w", encoding="utf-8") as problems:
        await _sessions(store, rendering, settings, recordings, report, problems, progress)
        for path in votes:
            await _votes(store, path, report, problems)
    report.seconds = time.monotonic() - started
    progress(report)
    return report


async def _sessions(
    store: Store,
    rendering: Rendering,
    settings: ImportSettings,
    recordings: Sequence[Path],
    report: ImportReport,
    problems: TextIO,
    progress: Callable[[ImportReport], None],
) -> None:
    prepared_rows: list[PreparedSession] = []
    writing: asyncio.Task[int] | None = None
    try:
        for item in read_recordings(recordings):
            if isinstance(item, Problem):
                _note(item, report, problems)
                continue
            if await store.is_deleted(session_key(item.session_id)):
                _note(_forgotten(item), report, problems)
                continue
            prepared = await asyncio.to_thread(
                prepare_session, item, rendering, store.redactor, settings, time.time()
            )
            _count(item, prepared, report, problems)
            if prepared.rows is not None:
                prepared_rows.append(prepared.rows)
            if len(prepared_rows) == _AT_ONCE:
                report.num_new += await writing if writing is not None else 0
                writing = asyncio.create_task(_write(store, prepared_rows))
                prepared_rows = []
            progress(report)
        report.num_new += await writing if writing is not None else 0
        report.num_new += await _write(store, prepared_rows)
    except BaseException:
        if writing is not None:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
        raise


def _forgotten(session: RecordedSession) -> Problem:
    return Problem(
        source=session.source,
        reason=ImportProblem.FORGOTTEN,
        detail="this session was deleted from the store, and nothing of it is written again",
        line=session.line,
        session_id=session.session_id,
    )


async def _write(store: Store, prepared: Sequence[PreparedSession]) -> int:
    """Returns how many turns are new."""
    return sum(await asyncio.gather(*(store.import_session(one) for one in prepared)))


def _count(
    session: RecordedSession, prepared: PreparedImport, report: ImportReport, problems: TextIO
) -> None:
    report.formats[session.format.value] += 1
    report.num_sessions += 1
    report.num_turns += len(session.turns)
    report.num_rendered += len(prepared.rows.turns) if prepared.rows else 0
    report.num_tokens += prepared.num_tokens
    for problem in prepared.problems:
        _note(problem, report, problems)


def _note(problem: Problem, report: ImportReport, problems: TextIO) -> None:
    report.problems[problem.reason.value] += 1
    line = {
        "source": problem.source,
        "line": problem.line,
        "session": problem.session_id,
        "message": problem.position,
        "reason": problem.reason.value,
        "detail": problem.detail,
    }
    problems.write(json.dumps(line, ensure_ascii=False) + "\n")


async def _votes(store: Store, path: Path, report: ImportReport, problems: TextIO) -> None:
    known: tuple[str, dict[int, str]] = ("", {})
    for item in read_votes(path):
        if isinstance(item, Problem):
            _note(item, report, problems)
            continue
        name, position, texts = item
        if known[0] != name:
            known = (name, await store.recorded_turns(SCOPE, name))
        turn_id = known[1].get(position)
        if turn_id is None:
            report.votes_without_turn += 1
            continue
        report.num_votes += 1
        report.num_votes_new += await store.import_votes(turn_id, texts)
