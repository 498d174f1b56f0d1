"""Where the turns of a run stand, in one line of a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from records.names import DropReason, TurnState
from records.store import Store

STATUS_WIDTH = 80
_WAITING = {
    TurnState.AWAITING_NEXT_STATE: "for what follows",
    TurnState.JUDGING: "judge",
    TurnState.REVIEWING: "a person",
    TurnState.SCORING: "teacher",
    TurnState.READY: "batch",
    TurnState.LEASED: "step",
}
"""What turns of each state wait for."""


async def status_line(store: Store) -> str:
    """One line: where the turns stand and which version serves."""
    latest = await store.latest_version()
    version = latest.version if latest is not None else 0
    counts, drops = await store.counts(), await store.drops()
    return shown_status(version, counts, drops, await store.judged_share())


def shown_status(
    version: int,
    counts: Mapping[TurnState, int],
    drops: Mapping[DropReason, int],
    judged_share: float | None = None,
) -> str:
    """The line, with as much detail as fits 80 columns; `judged_share` if not all are judged."""
    trained, dropped = (counts.get(state, 0) for state in (TurnState.TRAINED, TurnState.DROPPED))
    waiting = {
        words: counts.get(state, 0) for state, words in _WAITING.items() if counts.get(state, 0)
    }
    begin = f"version {version}; turns: {trained} trained, {sum(waiting.values())} waiting"
    end = f", {dropped} dropped"
    share = "" if judged_share is None else f"; {judged_share:.0%} judged"
    where = f" ({', '.join(f'{n} {words}' for words, n in waiting.items())})" if waiting else ""
    reasons = [f"{n} {reason.value}" for reason, n in sorted(drops.items(), key=lambda d: -d[1])]
    why = [f" ({', '.join(reasons)})", f" (most: {reasons[0]})"] if reasons else [""]
    details = [(where, one) for one in why] + [("", one) for one in why] + [(where, "")]
    ends = [share, ""] if share else [""]
    lines = (f"{begin}{place}{end}{reason}{last}" for last in ends for place, reason in details)
    return next((line for line in lines if len(line) <= STATUS_WIDTH), f"{begin}{end}")
