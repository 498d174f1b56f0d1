"""`opd doctor`: why each turn of a session was trained, waits, or was dropped, in plain words.

`explain` is pure: facts in, words out. It only reads, also while the run goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from opd.commands.doctor_overview import allow_command
from opd.commands.near_names import near_sessions
from opd.report.drop_words import DROP_WORDS, side_words
from opd.run.recorded_run import load_recorded
from records.messages import EchoChange
from records.names import DropReason, FeedbackOutcome, TurnState
from records.privacy.findings import DIGEST
from records.reading.diagnosis import RunFacts, SessionFacts, TurnFacts, VoteFacts
from records.store import Store
from trainer.errors import StartupError

Status = Literal["trained", "waiting", "dropped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the run's configuration says about waiting."""

    batch_size: int
    idle_timeout_s: float
    hint_wait_s: float | None
    """None: hints are not rehearsed, and no turn waits for its hint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What became of one turn.

    `waits_for`: next_state, votes, scoring, hint, batch or lease. `count` is the number of turns of
    the run that were dropped for the same reason. `echo_changes`: what the client changed of the
    answer before it went on. `lessons`: what became of lessons practised at its state, by kind.
    """

    turn_id: str
    created_at: float
    status: Status
    state: str
    why: str
    waits_for: str | None = None
    version: int | None = None
    reason: str | None = None
    rule: str | None = None
    detail: str | None = None
    count: int | None = None
    hint: str | None = None
    reward: float | None = None
    votes: dict[str, int] | None = None
    feedback: tuple[dict[str, Any], ...] = ()
    echo_changes: tuple[str, ...] = ()
    lessons: dict[str, int] = field(default_factory=dict)


def diagnose(config_file: Path, session: str) -> list[dict[str, Any]]:
    """The sessions of this id or name, as JSON values. Raises StartupError if there is none."""
    config = load_recorded(config_file)
    limits = Limits(
        batch_size=config.trainer.rollout_batch_size,
        idle_timeout_s=config.proxy.idle_timeout_s,
        hint_wait_s=config.trainer.hint_wait_s if config.rehearsal.enabled else None,
    )

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


def _report(session: SessionFacts, run: RunFacts, limits: Limits, now: float) -> dict[str, Any]:
    return {
        "session_id": session.session_id,
        "name": session.name,
        "last_seen": session.last_seen,
        "closed": session.close_reason if session.closed_at is not None else None,
        "turns": [asdict(explain(turn, session, run, limits, now)) for turn in session.turns],
    }


def explain(
    turn: TurnFacts, session: SessionFacts, run: RunFacts, limits: Limits, now: float
) -> Explanation:
    """Why a turn is where it is."""
    status: Status = "waiting"
    waits_for = count = rule = None
    if turn.state is TurnState.TRAINED:
        status = "trained"
        why = f"trained in step {turn.trained_version}, which made policy version " + str(
            turn.trained_version
        )
    elif turn.state is TurnState.DROPPED:
        assert turn.drop_reason is not None, "the store drops nothing without a reason"
        status, count = "dropped", run.drops.get(turn.drop_reason, 0)
        why = f"{turn.drop_reason}: {DROP_WORDS[turn.drop_reason]}"
        if turn.drop_detail is not None:
            why += f" [{turn.drop_detail.partition(f' {DIGEST}')[0]}]"
            if turn.drop_reason is DropReason.SIDE_TURN:
                rule = turn.drop_detail
                why += f": {side_words(rule)}"
        others = "this one alone" if count == 1 else f"{count} turns"
        why += f" (dropped for this in the whole run: {others})"
    else:
        waits_for, why = _waiting(turn, session, run, limits, now)
    return Explanation(
        turn_id=turn.turn_id,
        created_at=turn.created_at,
        status=status,
        state=turn.state.value,
        why=why,
        waits_for=waits_for,
        version=turn.trained_version,
        reason=turn.drop_reason.value if turn.drop_reason else None,
        rule=rule,
        detail=turn.drop_detail,
        count=count,
        hint=turn.hint,
        reward=turn.reward,
        votes=asdict(turn.votes) if turn.votes else None,
        feedback=tuple(
            {"id": f"fb_{one.feedback_id}", "outcome": one.outcome.value, "reason": one.reason}
            for one in turn.feedback
        ),
        echo_changes=turn.echo_changes,
        lessons=turn.lessons,
    )


def _waiting(
    turn: TurnFacts, session: SessionFacts, run: RunFacts, limits: Limits, now: float
) -> tuple[str, str]:
    """What a turn waits for, by one word and in many."""
    is_held = turn.claim_until is not None and turn.claim_until >= now
    if turn.state is TurnState.AWAITING_NEXT_STATE:
        left_s = max(session.last_seen + limits.idle_timeout_s - now, 0.0)
        return "next_state", (
            "waits for its next state: the next request of its conversation, or feedback; the "
            f"session ends after {left_s:.0f} s more of silence"
        )
    if turn.state is TurnState.JUDGING:
        if is_held:
            return "votes", f"waits for the judge's votes: {turn.claim_owner} is asking for them"
        number = run.states[TurnState.JUDGING]
        return "votes", f"waits for the judge's votes: {number} turns are in that queue"
    if turn.state is TurnState.SCORING:
        if is_held:
            return "scoring", f"waits for the teacher's score: {turn.claim_owner} is at it"
        number = run.states[TurnState.SCORING]
        return "scoring", f"waits for the teacher's score: {number} turns are in that queue"
    if turn.state is TurnState.READY:
        left_s = turn.updated_at + (limits.hint_wait_s or 0.0) - now
        if turn.awaits_practice and left_s > 0:
            return "hint", (
                f"waits until its hint is practised, {left_s:.0f} s at most (trainer.hint_wait_s): "
                "trained without counter-lessons, it would cost the open wish for the opposite"
            )
        ready = run.states[TurnState.READY]
        return "batch", (
            f"waits for a batch: {ready} turns are ready, a step takes {limits.batch_size}"
        )
    held = "" if is_held else "; the lease has run out, so that the turn can go to another step"
    return "lease", f"a step is being taken on it: leased by {turn.claim_owner}{held}"


_SAID = {
    FeedbackOutcome.TO_BE_JUDGED: "joined its next state",
    FeedbackOutcome.JUDGED_AGAIN: "sent it to the judge again",
    FeedbackOutcome.TOO_LATE: "came too late",
    FeedbackOutcome.NOT_TRAINED: "changes nothing: it does not train",
}


_CHANGED: dict[EchoChange, str] = {
    "text": "with other text beside its calls",
    "calls": "without some of its calls",
    "ids": "with other ids of its calls",
    "retold": "with its calls told as text",
}


def lines(sessions: Sequence[dict[str, Any]]) -> list[str]:
    """The report as text."""
    found: list[str] = []
    for session in sessions:
        named = f" ({session['name']})" if session["name"] else ""
        ended = f"closed: {session['closed']}" if session["closed"] else "open"
        seen = datetime.fromtimestamp(session["last_seen"], UTC).isoformat(" ", "seconds")
        found.append(f"session {session['session_id']}{named}, {ended}, last seen {seen}")
        if not session["turns"]:
            found.append("  no turn is stored")
        for number, turn in enumerate(session["turns"], start=1):
            found += _turn_lines(number, turn)
    return found


def _turn_lines(number: int, turn: dict[str, Any]) -> list[str]:
    found = [f"  {number}. turn {turn['turn_id']}: {turn['status']}", f"     {turn['why']}"]
    if turn["echo_changes"]:
        changed = ", ".join(_CHANGED[one] for one in turn["echo_changes"])
        found.append(
            f"     the client sent this answer back {changed}: its next state counts, and the "
            "prompt after it was rendered in full"
        )
    if turn["command"]:
        found.append(f"     if that text is nothing to protect: {turn['command']}")
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
    if turn["lessons"]:
        became = ", ".join(f"{count} {what}" for what, count in sorted(turn["lessons"].items()))
        found.append(f"     lessons at its state: {became}")
    for one in turn["feedback"]:
        because = f" ({one['reason']})" if one["reason"] else ""
        found.append(
            f"     feedback {one['id']}: {_SAID[FeedbackOutcome(one['outcome'])]}{because}"
        )
    return found
