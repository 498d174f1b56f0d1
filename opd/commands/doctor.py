"""`opd doctor`: why each turn of a session was trained, waits, or was dropped, in plain words.

It only reads, even while the run goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from opd.commands.doctor_overview import allow_command
from opd.commands.near_names import near_sessions
from opd.run.recorded_run import load_recorded
from records.messages import EchoChange
from records.names import DropReason, FeedbackOutcome
from records.reading.diagnosis import RunFacts, SessionFacts, VoteFacts
from records.reading.explaining import explain
from records.reading.waiting_limits import WaitingLimits
from records.store import Store
from trainer.errors import StartupError


def diagnose(config_file: Path, session: str) -> list[dict[str, Any]]:
    """The sessions of this id or name, as JSON values. Raises StartupError if there is none."""
    config = load_recorded(config_file)
    limits = config.waiting

    async def read() -> tuple[list[SessionFacts], RunFacts]:
        async with await Store.open(config.store) as store:
            found = await store.sessions_named(session)
            if not found:
                raise StartupError(
                    f"no session {session!r} in the records of {config_file}; give a session's id, "
                    "or the name that the client sent (X-Session-Id)"
                    + await near_sessions(store, session)
                )
            return found, await store.run_facts()

    sessions, run = asyncio.run(read())
    reports = [_report(one, run, limits, time.time()) for one in sessions]
    for turn in (turn for report in reports for turn in report["turns"]):
        is_sensitive = turn["reason"] == DropReason.SENSITIVE
        detail = turn["detail"] if is_sensitive else None
        turn["command"] = allow_command(detail, config_file)
    return reports


def _report(
    session: SessionFacts, run: RunFacts, limits: WaitingLimits, now: float
) -> dict[str, Any]:
    return {
        "session_id": session.session_id,
        "name": session.name,
        "last_seen": session.last_seen,
        "closed": session.close_reason if session.closed_at is not None else None,
        "outcome": None if session.outcome is None else asdict(session.outcome),
        "turns": [asdict(explain(turn, session, run, limits, now)) for turn in session.turns],
    }


_SAID = {
    FeedbackOutcome.TO_BE_JUDGED: "was added to its next state",
    FeedbackOutcome.JUDGED_AGAIN: "sent it to the judge again",
    FeedbackOutcome.TOO_LATE: "came too late",
    FeedbackOutcome.NOT_TRAINED: "changes nothing: it does not train",
}


_CHANGED: dict[EchoChange, str] = {
    "text": "with other text next to its calls",
    "calls": "without some of its calls",
    "ids": "with other ids of its calls",
    "retold": "with its calls written as text",
}


def lines(sessions: Sequence[dict[str, Any]]) -> list[str]:
    """The report as text."""
    found: list[str] = []
    for session in sessions:
        named = f" ({session['name']})" if session["name"] else ""
        ended = f"closed: {session['closed']}" if session["closed"] else "open"
        seen = datetime.fromtimestamp(session["last_seen"], UTC).isoformat(" ", "seconds")
        found.append(f"session {session['session_id']}{named}, {ended}, last seen {seen}")
        if session["outcome"] is not None:
            found.append(f"  {_outcome_line(session['outcome'])}")
        if not session["turns"]:
            found.append("  no turn is stored")
        for number, turn in enumerate(session["turns"], start=1):
            found += _turn_lines(number, turn)
    return found


def _outcome_line(outcome: dict[str, Any]) -> str:
    if outcome["failure"] is not None:
        return f"outcome: none, the {outcome['source']} failed: {outcome['failure']}"
    if outcome["value"] is None:
        return f"outcome: the {outcome['source']} is being asked"
    because = f": {' '.join(outcome['reason'].split())}" if outcome["reason"] else ""
    return f"outcome: {outcome['value']:g}, says the {outcome['source']}{because}"


def _turn_lines(number: int, turn: dict[str, Any]) -> list[str]:
    found = [f"  {number}. turn {turn['turn_id']}: {turn['status']}", f"     {turn['why']}"]
    if turn["echo_changes"]:
        changed = ", ".join(_CHANGED[one] for one in turn["echo_changes"])
        found.append(
            f"     the client sent this answer back {changed}: its next state counts, and the "
            "prompt after it was rendered in full"
        )
    if turn["command"]:
        found.append(f"     if that text needs no protection: {turn['command']}")
    if turn["votes"]:
        votes = VoteFacts(**turn["votes"])
        found.append(
            f"     votes: {votes.positive} for a hint, {votes.negative} against, "
            f"{votes.abstained} abstained, {votes.failed} failed"
        )
    if turn["hint"]:
        found.append(f"     hint: {' '.join(turn['hint'].split())}")
    if turn["reward"] is not None:
        found.append(f"     reward: {turn['reward']:g}")
    if turn["worth"] is not None:
        found.append(f"     worth before it was answered: {turn['worth']:g} (0 to 1)")
    if turn["lessons"]:
        became = ", ".join(f"{count} {what}" for what, count in sorted(turn["lessons"].items()))
        found.append(f"     lessons at its state: {became}")
    for one in turn["feedback"]:
        because = f" ({one['reason']})" if one["reason"] else ""
        found.append(
            f"     feedback {one['id']}: {_SAID[FeedbackOutcome(one['outcome'])]}{because}"
        )
    return found
