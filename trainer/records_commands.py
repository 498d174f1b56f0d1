"""What `opd records` does: deletion on request, backup, restore, verification.

Composition only: the store's part is in `records`, the checkpoints' in `trainer.manifest`. Each
function returns the lines to print, and whether all is well.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from records.config import StoreConfig
from records.deletion import Deleted
from records.housekeeping import Housekeeping
from records.messages import path_ids
from records.spill import withdraw
from records.spilled import Addition, decode
from records.store import Store
from trainer import run_config
from trainer.errors import StartupError

_PATIENCE_S = 30.0
"""How long to wait for a step that is being taken, and for living spill files to empty."""


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
    config = run_config.load(config_file)
    outcome = Outcome()
    asyncio.run(_forget(config.store, session, user, outcome))
    report = config_file.parent / "report.html"
    if report.exists():
        report.unlink()
        outcome.lines.append(f"deleted {report}, which shows turns; serving writes it again")
    return outcome


async def _forget(
    config: StoreConfig, session: str | None, user: str | None, outcome: Outcome
) -> None:
    async with await Store.open(config) as store:
        keeper = Housekeeping(store, time.time)
        session_ids = await keeper.find_sessions(session=session, user=user)
        responses = await keeper.response_nodes(session_ids)
        wanted = _Wanted(session, user, set(session_ids), responses)
        await _withdraw(config.spill_path, wanted, outcome)
        # What living processes spilled meanwhile is in the store now.
        session_ids = await keeper.find_sessions(session=session, user=user)
        if not session_ids:
            outcome.lines.append("no such session is stored")
            return
        began = await keeper.first_seen(session_ids)
        deleted = await keeper.delete(session_ids, "forget", patience_s=_PATIENCE_S)
        _say_deleted(deleted, session_ids, outcome)
        built_on = await keeper.versions_built_on(deleted.versions)
        _say_versions(deleted.versions, built_on, outcome)
        for backup in await keeper.backups():
            if began is not None and backup.created_at >= began:
                taken = datetime.fromtimestamp(backup.created_at, UTC).isoformat("T", "seconds")
                outcome.lines.append(f"may still hold it: backup {backup.location} of {taken}")


def _say_deleted(deleted: Deleted, session_ids: Sequence[str], outcome: Outcome) -> None:
    outcome.lines.append(
        f"deleted: {deleted.num_sessions} sessions, {deleted.num_turns} turns, "
        f"{deleted.num_messages} messages that no other session needs"
    )
    outcome.lines += [f"session {session_id}" for session_id in session_ids]
    if deleted.leased_by:
        outcome.problem(
            f"not deleted yet: {', '.join(deleted.leased_by)} is training on some of it; "
            "nothing more of it will be trained on, run the command again after the step"
        )


def _say_versions(versions: Sequence[int], built_on: Sequence[int], outcome: Outcome) -> None:
    if not versions:
        outcome.lines.append("no policy version was trained on it")
        return
    outcome.lines.append(f"policy versions trained on it: {_numbers(versions)}")
    later = sorted(set(built_on) - set(versions))
    if later:
        outcome.lines.append(f"versions that descend from them: {_numbers(later)}")


def _numbers(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Recognises spilled requests of what is to be forgotten."""

    session: str | None
    user: str | None
    session_ids: set[str]
    responses: set[str]
    """Message nodes that the sessions' turns answered with."""

    def __call__(self, payload: bytes) -> bool:
        try:
            return self._holds(decode(payload))
        except ValueError:  # of another program; whoever takes it in refuses it
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
        return not self.responses.isdisjoint(path_ids(addition.scope, turn.messages))


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
                f"running proxies hold spilled requests in {folder} ({names}), perhaps of this "
                "session: run the command again when they are taken in"
            )
            return
        await asyncio.sleep(0.5)
        waited_s += 0.5
