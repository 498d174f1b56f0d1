"""Sessions and keys whose recent turns were all dropped, and why: pure, with running counters.

A streak begins with a dropped turn, grows with each further one and ends with one that was kept, or
with a judge's or person's answer. Turns that a run deliberately does not train (side requests, keys
without consent) neither begin nor end one. It does not know the store.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from datetime import UTC, datetime

from records.names import DropReason
from records.privacy.findings import DIGEST

SAY_AT = 3
"""This many dropped turns in a row are worth a warning."""
_REMEMBERED = 2_000
"""Maximum number of streaks; the one that grew least recently is forgotten first."""
MEANT = frozenset(
    {
        DropReason.SIDE_TURN,
        DropReason.TEXT_COMPLETION,
        DropReason.RECORD_ONLY,
        DropReason.HELD_OUT,
        DropReason.FORGOTTEN,
        DropReason.SHUTDOWN,
        DropReason.RESAMPLED,
        DropReason.OVER_CAPACITY,
        DropReason.HINT_ONLY,
    }
)
"""Reasons that do not mean that something went wrong."""
ANSWERED = frozenset({DropReason.NO_HINT, DropReason.NEUTRAL_REWARD, DropReason.REVIEW_REJECTED})
"""Reasons that are an answer of the judge or a person: the turn took its normal course."""


@dataclass(slots=True)
class Streak:
    """Turns of `who` that were dropped one after the other, `since` that time (unix seconds)."""

    who: str
    since: float
    newest: float
    """The time of the last of them, in unix seconds."""
    reasons: Counter[DropReason] = field(default_factory=Counter)
    detail: str | None = None
    """Of the newest turn that was dropped for the most frequent reason."""

    @property
    def number(self) -> int:
        """How many turns."""
        return sum(self.reasons.values())

    @property
    def reason(self) -> DropReason:
        """The most frequent reason."""
        return self.reasons.most_common(1)[0][0]

    @property
    def digest(self) -> str | None:
        """The digest of the finding, if it can be allowed."""
        _, found, digested = (self.detail or "").partition(f" {DIGEST}")
        return f"{DIGEST}{digested}" if found else None

    def words(self) -> str:
        """One line, without anything that was found."""
        place = (self.detail or "").partition(f" {DIGEST}")[0]
        since = datetime.fromtimestamp(self.since, UTC).isoformat("T", "seconds")
        why = f"{self.reason} ({place})" if place else self.reason.value
        others = self.number - self.reasons[self.reason]
        also = f", {others} of them for other reasons" if others else ""
        return f"every turn of {self.who} since {since} was dropped: {why}, {self.number}{also}"


class DropStreaks:
    """The streaks of many."""

    def __init__(self) -> None:
        self._streaks: OrderedDict[str, Streak] = OrderedDict()

    def add(self, who: str, at: float, reason: DropReason | None, detail: str | None) -> None:
        """A turn of `who` was dropped for `reason`, or kept (None)."""
        if reason in MEANT:
            return
        if reason is None or reason in ANSWERED:
            self._streaks.pop(who, None)
            return
        streak = self._streaks.setdefault(who, Streak(who, at, at))
        streak.newest = max(streak.newest, at)
        self._streaks.move_to_end(who)
        streak.reasons[reason] += 1
        if streak.reason == reason:
            streak.detail = detail
        if len(self._streaks) > _REMEMBERED:
            self._streaks.popitem(last=False)

    def get(self, who: str) -> Streak | None:
        """The streak of `who`, if it is long enough to report."""
        streak = self._streaks.get(who)
        return streak if streak is not None and streak.number >= SAY_AT else None

    def told(self, after: float = 0.0) -> list[Streak]:
        """Streaks that are long enough to report and grew after that time, longest first."""
        long = [
            streak
            for streak in self._streaks.values()
            if streak.number >= SAY_AT and streak.newest >= after
        ]
        return sorted(long, key=lambda streak: -streak.number)
