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
POINTS_WITH_LESSONS = {
    **FAIL_POINTS,
    "judge": (*FAIL_POINTS["judge"], *_around("claim_hints", "examination", "add", "sample")),
}
"""Where hints are rehearsed: leases and steps, claims and scores are of turns and lessons."""
SHARES = {"proxy": 2, "judge": 2, "trainer": 1}
"""Of the kills: a trainer takes longest to start."""
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
    """Goes on until each process had its `wanted` kills that count, and each place `hits_each`."""

    wanted: dict[str, int]
    hits_each: int
    rng: random.Random
    points: dict[str, tuple[str, ...]] = field(default_factory=lambda: FAIL_POINTS)
    kills: list[Kill] = field(default_factory=list)
    _num_starts: Counter[str] = field(default_factory=Counter)

    @classmethod
    def shared(
        cls,
        kills: int,
        hits_each: int,
        rng: random.Random,
        points: dict[str, tuple[str, ...]] = FAIL_POINTS,
    ) -> KillPlan:
        """At least `kills`, shared among the processes."""
        total = sum(SHARES.values())
        wanted = {process: -(-kills * share // total) for process, share in SHARES.items()}
        return cls(wanted, hits_each, rng, points)

    def counted(self, process: str) -> int:
        """Kills of a process that count."""
        return sum(kill.counted for kill in self.kills if kill.process == process)

    def hits(self) -> Counter[str]:
        """Kills at each place, of the process whose place it is."""
        return Counter(f"{kill.process} {kill.point}" for kill in self.kills if kill.point)

    def is_done(self, process: str) -> bool:
        """Whether this process needs no further kill."""
        return not self._missed(process) and self.counted(process) >= self.wanted[process]

    def next(self, process: str) -> tuple[str, int] | None:
        """Where the next start of a process dies, at which visit; None: at a random instant.

        Places come in turn until each was hit often enough, every third start apart. From then on
        only those come where kills were found to count.
        """
        number = self._num_starts[process]
        self._num_starts[process] += 1
        if number % 3 == 2 and self.counted(process) < self.wanted[process]:
            return None
        hits = self.hits()
        points = self._missed(process) or self._telling(process) or self.points[process]
        fewest = min(hits[f"{process} {point}"] for point in points)
        chosen = [point for point in points if hits[f"{process} {point}"] == fewest]
        return self.rng.choice(chosen), self.rng.randint(1, MAX_VISIT[process])

    def progress(self) -> tuple[int, int]:
        """Kills done and wanted, for a progress bar."""
        done = sum(min(self.counted(process), count) for process, count in self.wanted.items())
        return done, sum(self.wanted.values())

    def _missed(self, process: str) -> list[str]:
        hits = self.hits()
        return [p for p in self.points[process] if hits[f"{process} {p}"] < self.hits_each]

    def _telling(self, process: str) -> list[str]:
        found = {kill.point for kill in self.kills if kill.process == process and kill.counted}
        return [point for point in self.points[process] if point in found]
