"""What `opd records export` does: composition only. It returns the lines to print."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from rich.console import Console

from judge.votes.calls import judge_client
from opd.commands.near_names import near_sessions
from opd.commands.records import Outcome
from opd.export.choice import WORDS
from opd.export.dataset import DatasetFolder
from opd.export.files import ExportFiles
from opd.export.folder import new_folder
from opd.export.jsonl import encode
from opd.export.request import Dataset, ExportRequest
from opd.export.rows import FORMAT, VERSION
from opd.export.taught import Taught, asking
from opd.processes.roles.judge import judge_config
from opd.report.terminal.progress import ProgressBar
from opd.run.config import RunConfig
from opd.run.recorded_run import load_recorded
from records.care.housekeeping import Backup, Housekeeping
from records.config import RedactionConfig
from records.privacy.detectors import SECRETS, TOO_LONG
from records.privacy.personal_data import PERSONAL
from records.reading.exporting import at_one_moment, num_sessions, read_sessions
from records.store import Store
from rollout_bridge.rendering.fingerprint import renderer_fingerprint
from rollout_bridge.rendering.rendering import Rendering
from trainer.errors import StartupError

_WANTED: dict[Dataset, str] = {
    "sft": "answers that needed no correction",
    "taught": "answers to correct",
    "preference": "preferences",
}


def export(config_file: Path, out: Path, request: ExportRequest) -> Outcome:
    """Write the files or the data set into the new folder `out`.

    Raises StartupError if `out` exists, if nothing can be chosen for a data set, or if it is
    unknown what the ids stand for.
    """
    config = load_recorded(config_file)
    out = out.absolute()
    outcome = Outcome()
    renderer = None
    if request.dataset is None and request.with_ids and "sessions" in request.what:
        renderer = _renderer(config)
    with new_folder(out) as folder:

        async def work(store: Store) -> None:
            if request.dataset is not None:
                await _dataset(store, folder, request, request.dataset, config, outcome)
            else:
                await _files(store, folder, request, renderer, outcome)

        asyncio.run(_noted(config, out, request, work))
    outcome.lines.append(f"written to {out}")
    return outcome


def _renderer(config: RunConfig) -> str:
    try:
        rendering = Rendering.load(config.model, config.renderer)
    except ValueError as error:
        raise StartupError(
            f"it is unknown what the token ids stand for: {error}; set `model` to where the model "
            "is now, or export with --no-ids"
        ) from error
    return renderer_fingerprint(rendering, config.renderer)


async def _noted(
    config: RunConfig, out: Path, request: ExportRequest, work: Callable[[Store], Awaitable[None]]
) -> None:
    """Do the work, and note the folder like a backup: `forget` names it as a place that may still
    contain a session.
    """
    async with await Store.open(config.store) as store:
        await _check_session(store, request)
        keeper = Housekeeping(store, time.time)
        noted = Backup(backup_id=uuid4().hex, location=str(out), created_at=time.time())
        await keeper.note_backup(noted)
        try:
            await work(store)
        except BaseException:
            await keeper.forget_backup(noted.backup_id)
            raise


async def _check_session(store: Store, request: ExportRequest) -> None:
    """Raise StartupError if a session is named that has nothing to export."""
    named = request.wanted.session
    if named is not None and not await num_sessions(store, request.wanted):
        raise StartupError(
            f"--session: the records contain no session {named!r} with such turns"
            + await near_sessions(store, named)
        )


async def _files(
    store: Store, folder: Path, request: ExportRequest, renderer: str | None, outcome: Outcome
) -> None:
    total = await num_sessions(store, request.wanted)
    files = ExportFiles(folder, request, renderer)
    with _bar("sessions", total) as shown:
        async for _ in read_sessions(store, request.wanted, files.read):
            shown.advance()
    num_rows = files.close()
    about = {
        "format": FORMAT,
        "version": VERSION,
        "exported_at": datetime.now(UTC).isoformat("T", "seconds"),
        "renderer": renderer,
        "turns": files.num_turns,
        "rows": num_rows,
        "since": request.wanted.since,
        "session": request.wanted.session,
        "states": sorted(request.wanted.states),
    }
    (folder / "export.json").write_bytes(encode(about) + b"\n")
    outcome.lines.append(f"{files.num_turns} turns of {total} sessions")
    for name, number in num_rows.items():
        outcome.lines.append(f"{name}.{request.file_format}: {number} rows")


async def _dataset(
    store: Store,
    folder: Path,
    request: ExportRequest,
    kind: Dataset,
    config: RunConfig,
    outcome: Outcome,
) -> None:
    rows = DatasetFolder(folder, kind, _marks(store.config.redaction))
    if kind == "sft":
        total = await num_sessions(store, request.wanted)
        with _bar("sessions", total) as shown:
            async for _ in read_sessions(store, request.wanted, rows.read_session):
                shown.advance()
    elif kind == "taught":
        judge = judge_config(config)
        async with judge_client(judge) as client:
            taught = Taught(rows, asking(client, judge))
            with _bar("sessions", await num_sessions(store, request.wanted)) as shown:
                async for _ in read_sessions(store, request.wanted, taught.read_session):
                    await taught.answer()
                    shown.advance()
    else:
        with _bar("turns with feedback") as shown:
            await at_one_moment(
                store, lambda c: rows.read_preferences(c, request.wanted, shown.update)
            )
    rows.close()
    left_out = [f"{number} left out: {WORDS[reason]}" for reason, number in rows.left_out.items()]
    if not rows.num_rows:
        why = f" ({'; '.join(left_out)})" if left_out else ""
        if kind == "preference":
            why = f"{why}: they come from feedback (docs/feedback.md)"
        raise StartupError(f"the records contain no {_WANTED[kind]} that could be chosen{why}")
    outcome.lines.append(f"{rows.num_rows} rows")
    outcome.lines += left_out


def _marks(config: RedactionConfig) -> frozenset[str]:
    """What redaction leaves in place of what it removed."""
    return frozenset(f"[{kind}]" for kind in (*SECRETS, *PERSONAL, TOO_LONG, *config.patterns))


def _bar(unit: str, total: int | None = None) -> ProgressBar:
    # Standard output is for the results.
    return ProgressBar(Console(stderr=True), "export", unit, total)
