"""A run's status, as lines of a terminal. Facts in, words out."""

from __future__ import annotations

import time
from collections.abc import Iterator

from api_proxy.pages.words import span
from opd.status.facts import Now, tokens_per_accepted
from opd.status.health import findings
from records.names import TurnState
from records.reading.drop_words import BLOCK_WORDS
from rollout_bridge.guard.checks import Checked
from rollout_bridge.rehearsal.figures import figures

_WIDTH = 96
_MOST_REASONS = 4
_WAITS_FOR = {
    TurnState.AWAITING_NEXT_STATE: "what follows",
    TurnState.JUDGING: "the judge",
    TurnState.REVIEWING: "a person (/ui/review)",
    TurnState.SCORING: "the teacher",
    TurnState.READY: "a batch",
    TurnState.LEASED: "the step's end",
}


def lines(now: Now) -> list[str]:
    """The whole page."""
    return [
        *_head(now),
        *_traffic(now),
        *_judged(now),
        *_learning(now),
        *_learned_from(now),
        *_health(now),
    ]


def _row(name: str, text: str) -> str:
    return f"{name:<15}{text}"


def _head(now: Now) -> Iterator[str]:
    yield f"{now.run}, {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now.time))}"
    made = now.version_made_at
    since = "" if made is None else f", {span(now.time - made)} old"
    where = now.endpoint.url if now.endpoint.ready is not None else "not serving"
    yield _row("version", f"{now.served_version}{since}; {where}")
    if now.staged_version is not None:
        yield _row("  staged", f"{now.staged_version}: serves nobody before it passes its check")


def _traffic(now: Now) -> Iterator[str]:
    trained = now.finished.get(TurnState.TRAINED, 0)
    dropped = now.finished.get(TurnState.DROPPED, 0)
    yield _row(
        "turns",
        f"{now.figures.turns} ({now.turns_per_minute:.1f} per minute); {trained} trained, "
        f"{dropped} dropped",
    )
    for state, queue in now.queues.items():
        if queue.turns:
            oldest = "" if queue.oldest_s is None else f", the oldest for {span(queue.oldest_s)}"
            yield _row("  waiting", f"{queue.turns} for {_WAITS_FOR[state]}{oldest}")
    reasons = [f"{number} {reason.value}" for reason, number in now.drops.items()]
    if reasons:
        more = ", ..." if len(reasons) > _MOST_REASONS else ""
        yield _row("  dropped", ", ".join(reasons[:_MOST_REASONS]) + more)


def _judged(now: Now) -> Iterator[str]:
    rate, votes = now.votes.accept_rate, now.votes
    if rate is None:
        yield _row("judge", "no turn judged yet")
        return
    parts = [f"{rate:.0%} of verdicts have a hint ({votes.accepted})"]
    if now.agreement is not None:
        parts.append(f"votes agree in {now.agreement:.0%} of pairs")
    if now.figures.judged_share is not None:
        parts.append(f"{now.figures.judged_share:.0%} of turns judged in time")
    cost = tokens_per_accepted(votes)
    if cost is not None:
        parts.append(f"{cost:,.0f} tokens per hint")
    yield _row("judge", "; ".join(parts))
    if (tokens := now.teacher_tokens_per_scored) is not None:
        yield _row("teacher", f"{tokens:,.0f} tokens per scored turn")


def _learning(now: Now) -> Iterator[str]:
    step, row = now.figures.step, now.figures.row
    if step:
        mean, most = step.get("staleness_mean"), step.get("staleness_max")
        stale = "" if mean is None else f"; samples {mean:.1f} versions stale, at most {most:.0f}"
        yield _row("last step", f"{step['version']}, {span(now.time - step['time'])} ago{stale}")
    else:
        yield _row("last step", "none yet")
    if now.kl_to_start is not None:
        yield _row("KL to start", f"{now.kl_to_start:.3g} nats per token, at the last step")
    measured = figures(row)
    for name, where in (("gap", ""), ("gap_where_trained", ", measured where it trains")):
        if name in measured:
            yield _row("gap", f"{measured[name]:.3g} nats per token (0: learned){where}")
    if row is not None and row.pooled is not None:
        pooled = row.pooled
        yield _row(
            "obedience",
            f"open wishes done {pooled.value:.2f} (start {pooled.before:.2f}, at least "
            f"{pooled.floor:.2f})",
        )
    if (check := now.check) is not None:
        yield _row(
            "canaries",
            f"{check.passed} of {check.asked} right at version {check.version}{_moved(check)}",
        )


def _moved(check: Checked) -> str:
    """How far a version's answers have moved, in nats per token."""
    parts = []
    if check.kl is not None:
        parts.append(f"{check.kl:.3f} nats per token from the start")
    if check.kl_last is not None:
        parts.append(f"version {check.last_good} {check.kl_last:.3f} from it")
    if check.gap is not None and check.gap_start is not None:
        start = check.gap_start.value
        parts.append(f"gap where it trained {check.gap.value:.3f} (start {start:.3f})")
    return "".join(f"; {one}" for one in parts)


def _learned_from(now: Now) -> Iterator[str]:
    for one in now.learned_from:
        words = "words deleted" if one.words is None else f'"{_short(one.words)}"'
        yield _row("learning from", words)
        yield _row("", f"-> {_short(one.hint)} ({one.status})")
        if one.block is not None:
            yield _row("", f"   not practised: {BLOCK_WORDS[one.block]} ({one.block.value})")


def _short(text: str) -> str:
    line = " ".join(text.split())
    most = _WIDTH - 30
    return line if len(line) <= most else f"{line[: most - 3]}..."


def _health(now: Now) -> Iterator[str]:
    found = findings(now)
    yield _row("health", "well" if not found else "look at this:")
    for one in found:
        yield f"  {one.what}"
        yield f"    {one.remedy}"
    if now.warnings:
        yield _row("warnings", "of the last hour")
    for warning in now.warnings:
        yield f"  {warning}"
