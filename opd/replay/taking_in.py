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

from opd.replay.importing import SCOPE, ImportSettings, PreparedImport, prepare_session, session_key
from opd.replay.recordings.reading import read_recordings
from opd.replay.recordings.recorded import ImportProblem, Problem, RecordedSession
from opd.replay.recordings.votes import Votes, read_votes
from records.reading.replaying import ImportedSession, PreparedSession
from records.store import Store
from records.turns.turn_writes import PreparedTurn
from rollout_bridge.rendering.rendering import Rendering

PROBLEMS_FILE = "import_problems.jsonl"
_PLACES_TOLD = 8
_AT_ONCE = 16
"""Sessions that are written in one transaction, while the next ones are read."""


@dataclass(slots=True, kw_only=True)
class ImportReport:
    """What was read and what became of it. `problems` counts by reason, `first_problems` contains
    the first of each, in words.
    """

    formats: Counter[str] = field(default_factory=Counter)
    num_sessions: int = 0
    num_turns: int = 0
    num_rendered: int = 0
    num_new: int = 0
    num_tokens: int = 0
    problems: Counter[str] = field(default_factory=Counter)
    first_problems: dict[str, str] = field(default_factory=dict)
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
            "first_problems": self.first_problems,
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

    Nothing is imported twice. Memory holds a few sessions at a time, however many there are.
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
    to_write: list[_ToWrite] = []
    in_writing: list[_ToWrite] = []
    writing: asyncio.Task[list[ImportedSession]] | None = None

    async def written() -> None:
        if writing is not None:
            _count_written(in_writing, await writing, report, problems)

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
                stored = await store.recorded_turns(SCOPE, item.session_id)
                others = [one.rows for one in (*in_writing, *to_write)]
                other = _says_otherwise(item, prepared.rows, stored, others)
                if other is not None:
                    _note(other, report, problems)
                to_write.append(
                    _ToWrite(
                        rows=prepared.rows,
                        source=item.source,
                        line=item.line,
                        session_id=item.session_id,
                    )
                )
            if len(to_write) == _AT_ONCE:
                await written()
                writing = asyncio.create_task(_write(store, to_write))
                to_write, in_writing = [], to_write
            progress(report)
        await written()
        _count_written(to_write, await _write(store, to_write), report, problems)
    except BaseException:
        if writing is not None:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
        raise


def _forgotten(session: RecordedSession) -> Problem:
    return Problem(
        source=session.source,
        reason=ImportProblem.FORGOTTEN,
        detail="this session was deleted from the store, and nothing of it is stored again",
        line=session.line,
        session_id=session.session_id,
    )


def _says_otherwise(
    session: RecordedSession,
    rows: PreparedSession,
    stored: dict[int, list[str]],
    others: Sequence[PreparedSession],
) -> Problem | None:
    """The problem that a recording of the same name, `stored` or among the `others` being written,
    has another turn at one of the positions.
    """
    known = {position: set(turn_ids) for position, turn_ids in stored.items()}
    for other in others:
        if other.session_id == rows.session_id:
            for turn in other.turns:
                known.setdefault(_position(turn), set()).add(turn.turn["turn_id"])
    for turn in rows.turns:
        position = _position(turn)
        if known.get(position, set()) - {turn.turn["turn_id"]}:
            return Problem(
                source=session.source,
                reason=ImportProblem.SAME_SESSION_ID,
                detail="another session with this id differs from here on; both are imported, as "
                "branches of one session, and votes by position apply to neither: use two ids",
                line=session.line,
                session_id=session.session_id,
                position=position,
            )
    return None


def _position(turn: PreparedTurn) -> int:
    assert turn.recording is not None, "imported turns come from a recording"
    return turn.recording["position"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ToWrite:
    """A session as rows, and where it was read."""

    rows: PreparedSession
    source: str
    line: int | None
    session_id: str


async def _write(store: Store, sessions: Sequence[_ToWrite]) -> list[ImportedSession]:
    return await asyncio.gather(*(store.import_session(one.rows) for one in sessions))


def _count_written(
    sessions: Sequence[_ToWrite],
    imported: Sequence[ImportedSession],
    report: ImportReport,
    problems: TextIO,
) -> None:
    for session, result in zip(sessions, imported, strict=True):
        report.num_new += result.num_new
        if result.other_outcome is not None:
            problem = Problem(
                source=session.source,
                reason=ImportProblem.OTHER_OUTCOME,
                detail=f"outcome_reward is {session.rows.outcome:g}, but the session already has "
                f"the outcome {result.other_outcome:g}, which stays",
                line=session.line,
                session_id=session.session_id,
            )
            _note(problem, report, problems)


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
    report.first_problems.setdefault(problem.reason.value, f"{problem.place}: {problem.detail}")
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
    known: tuple[str, dict[int, list[str]]] = ("", {})
    for item in read_votes(path):
        if isinstance(item, Problem):
            _note(item, report, problems)
            continue
        if known[0] != item.session_id:
            known = (item.session_id, await store.recorded_turns(SCOPE, item.session_id))
        turn_ids = known[1].get(item.position, [])
        if len(turn_ids) != 1:
            report.votes_without_turn += 1
            _note(_without_turn(path, item, known[1]), report, problems)
            continue
        report.num_votes += 1
        report.num_votes_new += await store.import_votes(turn_ids[0], item.texts)


def _without_turn(path: Path, votes: Votes, turns: dict[int, list[str]]) -> Problem:
    if not turns:
        detail = "no session with this id has turns here"
    elif votes.position in turns:
        detail = "sessions with this id differ at this message: it is unknown which one is meant"
    else:
        places = ", ".join(map(str, sorted(turns)[:_PLACES_TOLD]))
        detail = f"no turn of the session is at this message; its first turns are at {places}"
    return Problem(
        source=str(path),
        reason=ImportProblem.VOTES_WITHOUT_TURN,
        detail=detail,
        line=votes.line,
        session_id=votes.session_id,
        position=votes.position,
    )
