"""Which process dies where: the named places in turn, random instants in between.

It knows names and numbers; what a place is, is said in docs/reliability.md.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field


def _around(*operations: str) -> tuple[str, ...]:
    moments = ("uncommitted", "committed")
    return tuple(f"{operation}.{moment}" for operation in operations for moment in moments)


FAIL_POINTS: dict[str, tuple[str, ...]] = {
    "proxy": (*_around("ensure", "set_next_state", "record", "take_in"), "spill.appended"),
    "judge": _around("claim", "verdict", "score", "extend"),
    "trainer": (
        *_around("lease", "commit_step", "reconcile"),
        "checkpoint.unnamed",
        "checkpoint.named",
        "publish.loaded",
    ),
}
MAX_VISIT = {"proxy": 6, "judge": 6, "trainer": 1}
"""A place is one to die at from its first up to this visit: steps of a trainer are rare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """What became of one start of a process. `counted`: a row was under way when it died."""

    process: str
    point: str | None
    counted: bool


@dataclass
class KillPlan:
    """Goes on until each process had `kills_each` kills that count, and each place `hits_each`."""

    kills_each: int
    hits_each: int
    rng: random.Random
    kills: list[Kill] = field(default_factory=list)
    _num_starts: Counter[str] = field(default_factory=Counter)

    def counted(self, process: str) -> int:
        """Kills of a process that count."""
        return sum(kill.counted for kill in self.kills if kill.process == process)

    def hits(self) -> Counter[str]:
        """Kills at each place, of the process whose place it is."""
        return Counter(f"{kill.process} {kill.point}" for kill in self.kills if kill.point)

    def is_done(self, process: str) -> bool:
        """Whether this process needs no further kill."""
        hits = self.hits()
        reached = all(hits[f"{process} {p}"] >= self.hits_each for p in FAIL_POINTS[process])
        return reached and self.counted(process) >= self.kills_each

    def next(self, process: str) -> tuple[str, int] | None:
        """Where the next start of a process dies, at which visit; None: at a random instant."""
        number = self._num_starts[process]
        self._num_starts[process] += 1
        if number % 3 == 2 and self.counted(process) < self.kills_each:
            return None
        hits = self.hits()
        points = FAIL_POINTS[process]
        fewest = min(hits[f"{process} {point}"] for point in points)
        open_points = [point for point in points if hits[f"{process} {point}"] == fewest]
        return self.rng.choice(open_points), self.rng.randint(1, MAX_VISIT[process])

    def progress(self) -> tuple[int, int]:
        """Kills done and wanted, for a progress bar."""
        done = sum(min(self.counted(process), self.kills_each) for process in FAIL_POINTS)
        return done, self.kills_each * len(FAIL_POINTS)
