"""`opd doctor` without a session: for which sessions and keys every recent turn was dropped, and
what to do about it.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opd.run.recorded_run import load_recorded
from records.reading.drop_streaks import DropStreaks, Streak
from records.reading.drop_words import DROP_WORDS
from records.store import Store


def overview(config_file: Path) -> list[dict[str, Any]]:
    """The streaks, longest first, as JSON values. Raises StartupError without records."""
    config = load_recorded(config_file)

    async def read() -> list[dict[str, Any]]:
        async with await Store.open(config.store) as store:
            return await told_streaks(store, config_file)

    return asyncio.run(read())


async def told_streaks(store: Store, config_file: Path) -> list[dict[str, Any]]:
    """Like `overview`, for an open store."""
    streaks = DropStreaks()
    for one in await store.recent_outcomes():
        for who in (f"scope {one.scope}", f"session {one.session_id}"):
            streaks.add(who, one.created_at, one.reason, one.detail)
    return [_told(streak, config_file) for streak in streaks.told()]


def _told(streak: Streak, config_file: Path) -> dict[str, Any]:
    return {
        "who": streak.who,
        "since": streak.since,
        "number": streak.number,
        "reason": streak.reason.value,
        "words": streak.words(),
        "what": DROP_WORDS[streak.reason],
        "command": allow_command(streak.detail, config_file),
    }


def allow_command(detail: str | None, config_file: Path) -> str | None:
    """The command that allows what was found, from the detail of a dropped turn; None if an agent
    does not send it again and again.
    """
    digest = Streak("", 0.0, 0.0, detail=detail).digest
    if digest is None:
        return None
    return f"opd records allow {digest} --run {shlex.quote(str(config_file.parent))}"


def overview_lines(found: Sequence[dict[str, Any]]) -> list[str]:
    """The overview as text."""
    lines = [] if found else ["none of the newest sessions and keys has every turn dropped"]
    for one in found:
        lines += [one["words"], f"  {one['what']}"]
        if one["command"] is not None:
            lines.append(f"  if that text needs no protection: {one['command']}")
    return lines
