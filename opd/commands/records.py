"""What `opd records` does: deletion on request, backup, restore, verification.

Composition only: the store's part is in `records`, the checkpoints' in
`trainer.checkpoints.manifest`. Each function returns the lines to print, and whether all is well.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from sqlalchemy.engine import make_url

from opd.commands.near_names import did_you_mean
from opd.report.terminal.at_work import at_work
from opd.run import config as run_config
from opd.run.recorded_run import load_recorded
from records.care.backup import BackupFile, take
from records.care.backup import restore as bring_back
from records.care.deletion import Deleted
from records.care.housekeeping import Backup, Housekeeping
from records.care.lineage import DeletedSession
from records.care.verify import verify_database
from records.config import StoreConfig
from records.messages import path_ids
from records.spill.spill import withdraw
from records.spill.spilled import Addition, decode
from records.store import Store
from trainer.checkpoints.verify_checkpoints import checkpoint_problems
from trainer.errors import StartupError

_PATIENCE_S = 30.0
"""How long to wait for a running step, and for spill files of running proxies to empty."""


@dataclass(slots=True)
class Outcome:
    """Lines to print; `is_well` becomes the exit status."""

    lines: list[str] = field(default_factory=list)
    is_well: bool = True

    def problem(self, line: str) -> None:
        """Add a line that says what is wrong."""
        self.lines.append(line)
        self.is_well = False


def forget(config_file: Path, session: str | None, user: str | None) -> Outcome:
    """Delete a session (by id or client's name), or all sessions of an end user."""
    if (session is None) == (user is None):
        raise StartupError("name what to forget: either --session or --user")
    config = load_recorded(config_file)
    outcome = Outcome()
    with at_work("forgetting"):
        is_changed = asyncio.run(_forget(config.store, session, user, outcome))
    if not is_changed:
        return outcome
    report = config_file.parent / "report.html"
    if report.exists():
        report.unlink()
        outcome.lines.append(f"deleted {report}, which shows turns; serving writes it again")
    return outcome


async def _forget(
    config: StoreConfig, session: str | None, user: str | None, outcome: Outcome
) -> bool:
    """Whether there was anything to delete."""
    async with await Store.open(config) as store:
        keeper = Housekeeping(store, time.time)
        session_ids = await keeper.find_sessions(session=session, user=user)
        responses = await keeper.response_nodes(session_ids)
        wanted = _Wanted(session, user, set(session_ids), responses)
        await _withdraw(config.spill_path, wanted, outcome)
        # What living processes spilled meanwhile is in the store now.
        session_ids = await keeper.find_sessions(session=session, user=user)
        if not session_ids:
            earlier = await keeper.deleted_sessions(session=session, user=user)
            if not outcome.lines and not earlier:
                raise StartupError(await _nothing_of(keeper, session, user))
            was_spilled = bool(outcome.lines)
            if earlier:
                await _say_lineage(keeper, earlier, [], outcome)
            return was_spilled
        began = await keeper.first_seen(session_ids)
        deleted = await keeper.delete(session_ids, "forget", patience_s=_PATIENCE_S)
        _say_deleted(deleted, session_ids, outcome)
        gone = await keeper.deleted_sessions(session=session, user=user)
        left = await keeper.find_sessions(session=session, user=user)
        outcome.lines += [_was_deleted(one) for one in gone if one.session_id not in session_ids]
        await _say_versions(keeper, gone, left, outcome)
        for backup in await keeper.backups():
            if began is not None and backup.created_at >= began:
                taken = datetime.fromtimestamp(backup.created_at, UTC).isoformat("T", "seconds")
                gone = "" if Path(backup.location).exists() else ", which is no longer there"
                # Exports are noted along with backups, and are folders.
                kind = "export" if Path(backup.location).is_dir() else "backup"
                outcome.lines.append(
                    f"may still contain it: {kind} {backup.location} of {taken}{gone}"
                )
        for path in sorted(config.spill_path.glob("*.damaged")):
            outcome.lines.append(f"may still contain it: {path}, a damaged spill file; delete it")
    return True


def lineage(config_file: Path, session: str) -> Outcome:
    """The versions that were trained on a session (by id or client's name), stored or deleted, and
    those that descend from them.
    """
    config = load_recorded(config_file)
    outcome = Outcome()
    asyncio.run(_lineage(config.store, session, outcome))
    return outcome


async def _lineage(config: StoreConfig, session: str, outcome: Outcome) -> None:
    async with await Store.open(config) as store:
        keeper = Housekeeping(store, time.time)
        stored = await keeper.find_sessions(session=session)
        deleted = await keeper.deleted_sessions(session=session)
        if not stored and not deleted:
            hint = did_you_mean(session, await keeper.session_names())
            raise StartupError(f"{session}: no session with this id or name is or was stored{hint}")
        await _say_lineage(keeper, deleted, stored, outcome)


async def _say_lineage(
    keeper: Housekeeping,
    deleted: Sequence[DeletedSession],
    stored: Sequence[str],
    outcome: Outcome,
) -> None:
    outcome.lines += [f"session {session_id}: stored" for session_id in stored]
    outcome.lines += [_was_deleted(one) for one in deleted]
    await _say_versions(keeper, deleted, stored, outcome)


def _was_deleted(one: DeletedSession) -> str:
    at = datetime.fromtimestamp(one.deleted_at, UTC).isoformat("T", "seconds")
    how = "on request" if one.reason == "forget" else "by age"
    return f"session {one.session_id}: deleted {how} at {at}"


async def _nothing_of(keeper: Housekeeping, session: str | None, user: str | None) -> str:
    """Says that nothing is stored under the given name, and which names are near."""
    option, given = ("--session", session) if session is not None else ("--user", user)
    known = await keeper.session_names() if session is not None else await keeper.users()
    hint = did_you_mean(str(given), known)
    return f"{option} {given}: nothing of it is stored, and nothing was changed{hint}"


def _say_deleted(deleted: Deleted, session_ids: Sequence[str], outcome: Outcome) -> None:
    outcome.lines.append(
        f"deleted: {deleted.num_sessions} sessions, {deleted.num_turns} turns, "
        f"{deleted.num_messages} messages that no other session needs"
        + (f", {deleted.num_lessons} lessons sampled there" if deleted.num_lessons else "")
    )
    if deleted.num_answers:
        outcome.lines.append(
            f"pass rates of prompts no longer count {deleted.num_answers} rewarded answers"
        )
    outcome.lines += [f"session {session_id}" for session_id in session_ids]
    if deleted.leased_by:
        outcome.problem(
            f"not deleted yet: {', '.join(deleted.leased_by)} is training on some of it; "
            "nothing more of it will be trained on, run the command again after the step"
        )


async def _say_versions(
    keeper: Housekeeping,
    deleted: Sequence[DeletedSession],
    stored: Sequence[str],
    outcome: Outcome,
) -> None:
    versions = set(await keeper.trained_on(stored))
    versions.update(number for one in deleted for number in one.versions or ())
    unknown = [one.session_id for one in deleted if one.versions is None]
    if versions:
        outcome.lines.append(f"policy versions trained on it: {_numbers(sorted(versions))}")
    elif not unknown:
        outcome.lines.append("no policy version was trained on it")
    later = set(await keeper.versions_built_on(sorted(versions))) - versions
    if later:
        outcome.lines.append(f"versions that descend from them: {_numbers(sorted(later))}")
    if unknown:
        outcome.lines.append(
            f"which versions were trained on {', '.join(unknown)} is not known: an older "
            "program deleted it"
        )
    if not all(one.is_settled for one in deleted):
        outcome.lines.append(
            "a step is training on a lesson of a hint that came from it: ask again after the "
            "step which version resulted"
        )


def _numbers(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Recognises spilled requests that are to be forgotten."""

    session: str | None
    user: str | None
    session_ids: set[str]
    responses: set[str]
    """Message nodes that the sessions' turns answered with."""

    def __call__(self, payload: bytes) -> bool:
        try:
            return self._holds(decode(payload))
        except ValueError:  # of another program; it is refused when it is moved to the store
            return False

    def _holds(self, addition: Addition) -> bool:
        if self.session is not None and addition.session_name == self.session:
            return True
        turn = addition.turn
        if turn is None:
            return False
        if self.user is not None and turn.user_id == self.user:
            return True
        if turn.session_id in self.session_ids or turn.session_id == self.session:
            return True
        path = turn.identity.node_ids if turn.identity else path_ids(addition.scope, turn.messages)
        return not self.responses.isdisjoint(path)


async def _withdraw(folder: Path, is_unwanted: Callable[[bytes], bool], outcome: Outcome) -> None:
    waited_s = 0.0
    while True:
        number, living = await asyncio.to_thread(withdraw, folder, is_unwanted)
        if number:
            outcome.lines.append(f"deleted: {number} spilled requests")
        if not living:
            return
        if waited_s >= _PATIENCE_S:
            names = ", ".join(path.name for path in living)
            outcome.problem(
                f"running proxies have spilled requests in {folder} ({names}), perhaps of this "
                "session: run the command again when these are in the store"
            )
            return
        await asyncio.sleep(0.5)
        waited_s += 0.5


def backup(config_file: Path, destination: Path) -> Outcome:
    """Copy the database to a file and verify the copy."""
    config = load_recorded(config_file)
    outcome = Outcome()
    with at_work("backup"):
        asyncio.run(_backup(config.store, destination.absolute(), outcome))
    return outcome


async def _backup(config: StoreConfig, destination: Path, outcome: Outcome) -> None:
    async with await Store.open(config) as store:
        keeper = Housekeeping(store, time.time)
        # Noted first: even an interrupted backup may contain what is to be forgotten later.
        noted = Backup(backup_id=uuid4().hex, location=str(destination), created_at=time.time())
        await keeper.note_backup(noted)
        try:
            made = await asyncio.to_thread(
                take, config, destination, noted.backup_id, noted.created_at
            )
        except BaseException:
            await keeper.forget_backup(noted.backup_id)
            raise
    outcome.lines.append(f"backup: {destination} ({made.size} bytes, sha256 {made.sha256})")
    if config.is_sqlite:
        await _verify_database(StoreConfig.sqlite(destination), outcome)


def restore(config_file: Path, source: Path) -> Outcome:
    """Restore a backup as the run's database, if there is none, and verify it."""
    config = run_config.load(config_file)
    outcome = Outcome()
    with at_work("restoring"):
        asyncio.run(_restore(config.store, source.absolute(), outcome))
    return outcome


async def _restore(config: StoreConfig, source: Path, outcome: Outcome) -> None:
    made = await bring_back(source, config)
    taken = datetime.fromtimestamp(made.created_at, UTC).isoformat("T", "seconds")
    outcome.lines.append(f"restored: {source}, as it was at {taken}")
    outcome.lines.append(
        "sessions that were forgotten later are in it again: forget them again by their ids"
    )
    async with await Store.open(config):
        pass  # migrates an older schema
    await _verify_database(config, outcome)


def verify(config_file: Path, backup_file: Path | None) -> Outcome:
    """Check a run's database and its checkpoints, or a backup."""
    config = run_config.load(config_file)
    outcome = Outcome()
    with at_work("verifying"):
        if backup_file is not None:
            asyncio.run(_verify_backup(backup_file.absolute(), outcome))
        else:
            asyncio.run(_verify_run(config.store, config_file.parent / "checkpoints", outcome))
    return outcome


async def _verify_backup(path: Path, outcome: Outcome) -> None:
    made = BackupFile.read(path)
    made.check(path)
    if made.kind == "postgresql":
        outcome.lines.append(
            f"{path}: its bytes are those of the backup; its content is checked when it is restored"
        )
        return
    await _verify_database(StoreConfig.sqlite(path), outcome)


async def _verify_run(config: StoreConfig, checkpoints: Path, outcome: Outcome) -> None:
    await _verify_database(config, outcome)
    if not outcome.is_well or not checkpoints.is_dir():
        return
    async with await Store.open(config) as store:
        keeper = Housekeeping(store, time.time)
        problems = checkpoint_problems(
            checkpoints,
            await keeper.versions(),
            await keeper.trained_turns(),
            lessons=await keeper.trained_lessons(),
            may_lack_turns=await keeper.has_deletions(),
        )
        if problems:
            await keeper.compare_all_at_start()
    for problem in problems:
        outcome.problem(f"checkpoints: {problem}")
    if not problems:
        outcome.lines.append(f"{checkpoints}: manifests and store agree")


async def _verify_database(config: StoreConfig, outcome: Outcome) -> None:
    name = config.sqlite_path or make_url(config.url).render_as_string(hide_password=True)
    problems = await verify_database(config)
    for problem in problems:
        outcome.problem(f"{name}: {problem}")
    if not problems:
        outcome.lines.append(f"{name}: schema, references, checksums and states are in order")
