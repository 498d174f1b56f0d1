"""Whether a run is well, in words: what is wrong, and what to do. Facts in, words out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from opd.status.facts import Now
from records.names import TurnState

SILENT_AFTER_S = 60.0
"""A process writes its metrics every 5 s; after this time it is gone, or hangs."""
LATE_AFTER_S = 600.0
"""A turn that waits longer for the judge or the teacher shows that there are more than they can do.
"""
_ENOUGH_VOTES = 50
_LOW_AGREEMENT = 0.6
_LOW_SHARE = 0.5
_SLOW = {
    TurnState.JUDGING: (
        "judge",
        "raise judge.loop.concurrency, or use a faster judge (serve --judge-url)",
    ),
    TurnState.SCORING: (
        "teacher",
        "raise scoring.loop.concurrency, or give the teacher its own engine (frozen.url)",
    ),
    TurnState.REVIEWING: (
        "person who decides on their hints",
        "decide at /ui/review, or ask for less (judge.review)",
    ),
}
_LATE_AFTER_S = {TurnState.REVIEWING: 86_400.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that is wrong, and what to do about it."""

    what: str
    remedy: str


def findings(now: Now) -> list[Finding]:
    """All that is wrong, the most serious first; empty for a healthy run."""
    return [*_processes(now), *_stopped(now), *_judge(now), *_queues(now), *_learning(now)]


def _processes(now: Now) -> Iterator[Finding]:
    ready, again = now.endpoint.ready, f"opd serve --run {now.run}"
    silent = [name for name, age_s in now.processes.items() if age_s > SILENT_AFTER_S]
    is_silent = len(silent) == len(now.processes)
    if ready is None and is_silent:
        yield Finding(what="the run is not running", remedy=f"start it: {again}")
        return
    if ready is None:
        yield Finding(
            what=f"no endpoint answers at {now.endpoint.url}",
            remedy=f"see logs/proxy.log; start it again: {again}",
        )
    elif ready["status"] != "ok":
        failed = [part for part in ("engine", "store") if not ready.get(part)]
        yield Finding(
            what=f"the endpoint accepts no requests: {ready['status']} ({', '.join(failed)})",
            remedy="see logs/engine_policy.log and logs/proxy.log; it goes on by itself once they "
            "answer",
        )
    for name in silent:
        yield Finding(
            what=f"the process {name} has reported nothing for {now.processes[name]:.0f} s",
            remedy=f"see logs/{name}.log; start the run again if it does not come back: {again}",
        )


def _stopped(now: Now) -> Iterator[Finding]:
    if now.why_stopped is not None:
        yield Finding(
            what=f"training has stopped: {now.why_stopped}",
            remedy=f"fix that, then: opd policy resume --run {now.run}",
        )


def _judge(now: Now) -> Iterator[Finding]:
    for counter, who, setting in (
        ("hint_judge_failures_in_a_row", "judge", "judge.base_url"),
        ("teacher_failures_in_a_row", "teacher", "frozen.url"),
    ):
        if failures := now.counted.get(counter):
            yield Finding(
                what=f"the {who} does not answer: {failures:.0f} failures in a row",
                remedy=f"check {setting} and its server (opd doctor --run {now.run}); the turns "
                "wait for it",
            )
    cast = now.votes.votes_pos + now.votes.votes_neg + now.votes.votes_none
    if now.votes.accepted == 0 and cast >= _ENOUGH_VOTES:
        yield Finding(
            what=f"the judge has accepted no hint in {cast} votes",
            remedy=f"see whether it understands its task (opd doctor --run {now.run} asks it three "
            "questions), or whether users object at all (opd doctor SESSION)",
        )
    if now.agreement is not None and now.agreement < _LOW_AGREEMENT:
        yield Finding(
            what=f"the judge's votes on a turn agree in only {now.agreement:.0%} of pairs",
            remedy="use a stronger judge (serve --judge-url), or raise judge.min_positive_votes",
        )
    for words in now.always_dropped:
        yield Finding(what=words, remedy=f"opd doctor --run {now.run} shows why")


def _queues(now: Now) -> Iterator[Finding]:
    for state, (who, remedy) in _SLOW.items():
        oldest_s = now.queues[state].oldest_s
        if oldest_s is not None and oldest_s > _LATE_AFTER_S.get(state, LATE_AFTER_S):
            turns = now.queues[state].turns
            yield Finding(
                what=f"{turns} turns wait for the {who}, the oldest for {oldest_s / 60:.0f} min",
                remedy=remedy,
            )
    share = now.figures.judged_share
    if share is not None and share < _LOW_SHARE:
        yield Finding(
            what=f"only {share:.0%} of the turns are judged before they are too old to train",
            remedy=_SLOW[TurnState.JUDGING][1],
        )


def _learning(now: Now) -> Iterator[Finding]:
    row = now.figures.row
    if row is not None and row.pooled is not None and not row.pooled.passed:
        yield Finding(
            what=f"open wishes are done too seldom: {row.pooled.value:.2f}, at least "
            f"{row.pooled.floor:.2f} is required",
            remedy="look at the hints that cost them (opd hints list); delete what is not a rule",
        )
    if now.figures.turns == 0 and now.endpoint.ready is not None:
        yield Finding(
            what="no request has come yet",
            remedy=f"point an OpenAI client at {now.endpoint.url}/v1",
        )
