"""Why each turn of a session was trained, waits, or was dropped, in plain words. Pure: facts in,
words out.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from records.names import DropReason, TurnState
from records.privacy.findings import DIGEST
from records.reading.diagnosis import RunFacts, SessionFacts, TurnFacts
from records.reading.drop_words import DROP_WORDS, side_words
from records.reading.waiting_limits import WaitingLimits

Status = Literal["trained", "waiting", "dropped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What became of one turn.

    `waits_for`: next_state, votes, review, scoring, hint, outcome, batch or lease. `count` is the
    number of turns of the run that were dropped for the same reason. `echo_changes`: what the
    client changed in the answer before it went on. `lessons`: what became of lessons practised at
    its state, by kind.
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
    worth: float | None = None
    votes: dict[str, int] | None = None
    feedback: tuple[dict[str, Any], ...] = ()
    echo_changes: tuple[str, ...] = ()
    lessons: dict[str, int] = field(default_factory=dict)


def explain(
    turn: TurnFacts, session: SessionFacts, run: RunFacts | None, limits: WaitingLimits, now: float
) -> Explanation:
    """Why a turn is where it is. Without `run`, nothing is said about the run's other turns."""
    status: Status = "waiting"
    waits_for = count = rule = None
    if turn.state is TurnState.TRAINED:
        status = "trained"
        why = f"trained in step {turn.trained_version}, which made policy version " + str(
            turn.trained_version
        )
        if turn.times_trained > 1:
            why += f"; {turn.times_trained} steps trained it in all"
        if turn.times_left > 0:
            why += f"; it may train {turn.times_left} more times while it is fresh enough"
    elif turn.state is TurnState.DROPPED:
        assert turn.drop_reason is not None, "the store drops nothing without a reason"
        status = "dropped"
        count = None if run is None else run.drops.get(turn.drop_reason, 0)
        why = f"{turn.drop_reason}: {DROP_WORDS[turn.drop_reason]}"
        if turn.drop_detail is not None:
            why += f" [{turn.drop_detail.partition(f' {DIGEST}')[0]}]"
            if turn.drop_reason is DropReason.SIDE_TURN:
                rule = turn.drop_detail
                why += f": {side_words(rule)}"
        if count is not None:
            others = "only this one" if count == 1 else f"{count} turns"
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
        worth=turn.worth,
        votes=asdict(turn.votes) if turn.votes else None,
        feedback=tuple(
            {"id": f"fb_{one.feedback_id}", "outcome": one.outcome.value, "reason": one.reason}
            for one in turn.feedback
        ),
        echo_changes=turn.echo_changes,
        lessons=turn.lessons,
    )


def _waiting(
    turn: TurnFacts, session: SessionFacts, run: RunFacts | None, limits: WaitingLimits, now: float
) -> tuple[str, str]:
    """What a turn waits for, in one word and in a sentence."""
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
        return "votes", "waits for the judge's votes" + _queue(run, TurnState.JUDGING)
    if turn.state is TurnState.REVIEWING:
        return "review", "waits for a person to approve, edit or reject its hint, at /ui/review"
    if turn.state is TurnState.SCORING:
        if is_held:
            return "scoring", f"waits for the teacher's score: {turn.claim_owner} is scoring it"
        return "scoring", "waits for the teacher's score" + _queue(run, TurnState.SCORING)
    if turn.state is TurnState.READY:
        left_s = turn.updated_at + (limits.hint_wait_s or 0.0) - now
        if turn.awaits_practice and left_s > 0:
            return "hint", (
                f"waits until its hint is practised, {left_s:.0f} s at most (trainer.hint_wait_s): "
                "trained without counter-lessons, it would cost the open wish for the opposite"
            )
        if (waiting := _outcome_wait(turn, session, limits, now)) is not None:
            return "outcome", waiting
        ready = "" if run is None else f"{run.states[TurnState.READY]} turns are ready, "
        if limits.batch_size is None:
            return "batch", "waits for a batch"
        return "batch", f"waits for a batch: {ready}a step takes {limits.batch_size}"
    held = "" if is_held else "; the lease has expired, so the turn can go to another step"
    return "lease", f"a step is being taken on it: leased by {turn.claim_owner}{held}"


def _outcome_wait(
    turn: TurnFacts, session: SessionFacts, limits: WaitingLimits, now: float
) -> str | None:
    """The words for a ready turn that waits for its session's outcome; None: it does not."""
    known = session.outcome
    if limits.outcome_wait_s is None or (
        known is not None and (known.value is not None or known.failure is not None)
    ):
        return None
    left_s = turn.updated_at + limits.outcome_wait_s - now
    if left_s <= 0:
        return None
    return (
        f"waits for its session's outcome, {left_s:.0f} s at most (trainer.outcome_wait_s): "
        "POST /v1/feedback with session_outcome, or the verifier gives it"
    )


def _queue(run: RunFacts | None, state: TurnState) -> str:
    return "" if run is None else f": {run.states[state]} turns are in that queue"
