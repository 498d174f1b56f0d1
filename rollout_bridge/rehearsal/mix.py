"""When a batch waits for lessons, and how many of them it contains: for every trainer.

It asks the store and reads RUN/rehearsal.jsonl. It knows no weights and takes no step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from records.lessons.names import LessonDrop, LessonKind, LessonState
from records.store import Store
from records.training.share import LessonShares
from records.types import ReadySample
from rollout_bridge.rehearsal.config import RehearsalConfig
from rollout_bridge.rehearsal.figures import figures
from rollout_bridge.rehearsal.journal import LastRow
from rollout_bridge.rehearsal.recovery import rate_after, shares_after

logger = logging.getLogger(__name__)

SAY_EVERY_S = 60.0


def pool_metrics(
    counts: Mapping[tuple[LessonKind, LessonState], int], drops: Mapping[LessonDrop, int]
) -> dict[str, int]:
    """Lessons that are ready, by kind, and those dropped since the run began, by reason."""
    ready = {
        f"lessons/ready_{kind.value}": counts.get((kind, LessonState.READY), 0)
        for kind in LessonKind
    }
    return ready | {
        f"lessons/dropped_{reason.value}": drops.get(reason, 0) for reason in LessonDrop
    }


class _MeasurementWait:
    """Logs once a minute that training waits for a measurement, and for how long it has."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._said_at = 0.0

    def end(self) -> None:
        """It is there, or none is needed."""
        self._since = None

    def say(self, version: int) -> None:
        """At each check."""
        now = time.monotonic()
        if self._since is None:
            self._since = self._said_at = now
        if now - self._said_at >= SAY_EVERY_S:
            self._said_at = now
            logger.warning(
                "training waits for the measurement of version %d: judge and engine have not "
                "answered all of it for %d s",
                version,
                now - self._since,
            )


class LessonMix:
    """The lessons' part of a trainer's batches; none where the run does not rehearse."""

    def __init__(
        self, store: Store, shares: LessonShares, folder: Path, rehearsal: RehearsalConfig | None
    ) -> None:
        self._store = store
        self._shares = shares
        self._rehearsal = rehearsal
        self._full_since: float | None = None
        self._waits = _MeasurementWait()
        self._journal = LastRow(folder)
        self._steps_alone = 0

    async def awaits_measurement(self, version: int) -> bool:
        """Whether `version` has yet to be measured, however long that takes: whether there is a
        next step, and what it contains, depends on it. Never if no hint is practised, as the
        rehearsal worker then measures nothing. A version that failed is measured again if somebody
        removed the stop order.
        """
        if self._rehearsal is None:
            return False
        row = self._journal.read()
        is_measured = row is not None and row.version == version and row.failure is None
        if is_measured or not await self._store.is_practising():
            self._waits.end()
            return False
        self._waits.say(version)
        return True

    async def num_ready(self) -> int:
        """Number of lessons that could fill a batch."""
        if self._rehearsal is None:
            return 0
        counts = await self._store.lesson_counts()
        return sum(number for (_, state), number in counts.items() if state is LessonState.READY)

    def shares(self, *, is_full: bool, finishes: bool) -> LessonShares | None:
        """How much of the next batch lessons fill. `is_full`: turns alone would fill it; they train
        alone after that was so for `lesson_wait_s`, and at once if a run `finishes`.
        """
        if self._rehearsal is None:
            return None
        now = time.monotonic()
        if not is_full:
            self._full_since = None
        elif self._full_since is None:
            self._full_since = now
        wait_s = self._shares.wait_s
        waited = self._full_since is not None and now - self._full_since >= wait_s
        floor = self._rehearsal.obedience_floor
        shares = shares_after(self._journal.read(), self._shares, floor)
        # After a fall the next step has no hinted sample, however long its lessons take.
        alone = finishes or (waited and shares.hinted)
        return replace(shares, alone=alone, hold_s=0.0 if finishes else shares.hold_s)

    def rate(self) -> float:
        """The factor of the next step's learning rate."""
        if self._rehearsal is None:
            return 1.0
        rate = rate_after(self._journal.read(), self._rehearsal.obedience_floor)
        if rate < 1.0:
            logger.info("a step at %g of the rate: versions lost many open wishes", rate)
        return rate

    def leased(self) -> None:
        """A batch was leased: the next one waits anew."""
        self._full_since = None

    async def metrics(self, samples: Sequence[ReadySample]) -> dict[str, float]:
        """After a step on `samples`: lessons ready and dropped; steps since this process began that
        had no lessons though counter-lessons were on their way; and the results of the last
        measured version.
        """
        if self._rehearsal is None:
            return {}
        counts = await self._store.lesson_counts()
        has_counter = any(kind is LessonKind.COUNTER for kind, _ in counts)
        if has_counter and all(sample.lesson is None for sample in samples):
            self._steps_alone += 1
            logger.warning("a step of turns alone: its lessons did not come in time")
        found = pool_metrics(counts, await self._store.lesson_drops())
        measured = {f"hints/{name}": value for name, value in figures(self._journal.read()).items()}
        return found | {"lessons/steps_alone": self._steps_alone} | measured
