"""When generation waits for training: the trainer's side of `trainer.schedule`.

`sync` holds from the moment a batch is full until its weights are served. `step_off` holds while a
new sample would train more than `steps_off` versions after its own (ALGORITHMS 5.5). `async` never
holds. Every hold ends after `max_hold_s`, and then there is none until the next version is served.
It ends at once when training stops, whatever the reason. If this process is killed, its hold ends
with it (`rollout_bridge.engine.hold_file`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from pathlib import Path
from typing import Literal

from records.errors import StoreError
from records.queue.freshness import Untrained
from records.store import Store
from records.training.staleness import admit
from rollout_bridge.engine.hold_file import HoldOrder, HoldRules, HoldWriter
from rollout_bridge.stop_order import STOP_FILE

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.1
End = Literal["served", "room", "max_hold", "stopped", "no_batch"]
"""Why a hold ended: weights are served; few enough samples are ahead; it took too long; training
stops; the batch turned out to have no usable sample.
"""


class Holds:
    """The holds of one trainer. `batch_size` is how many turns a step takes, lessons aside."""

    def __init__(
        self, store: Store, rules: HoldRules, folder: Path, *, batch_size: int, version: int
    ) -> None:
        self._store, self._rules, self._batch_size = store, rules, batch_size
        self.version = version
        """The newest one that was served when generation last resumed."""
        self._stop_file = folder / STOP_FILE
        self._file = HoldWriter(folder)
        self._order: HoldOrder | None = None
        self._is_stepping = False
        self._gave_up = False
        self._ends: Counter[End] = Counter()
        self._held_s = self._total_s = 0.0
        self._total_holds = 0
        self.accept_rate: float | None = None
        """Share of the turns so far that the judge accepts; None: it has judged none."""

    def batch_is_full(self) -> None:
        """A batch is full."""
        if self._rules.schedule == "sync":
            self._begin(f"a batch of version {self.version} is full (trainer.schedule sync)")

    def step_begins(self) -> None:
        """A batch is leased."""
        self._is_stepping = True

    def no_batch(self) -> None:
        """There is no full batch, or no longer one."""
        if self._rules.schedule == "sync":
            self._end("no_batch")

    def step_ended(self, version: int) -> None:
        """The step's weights, of `version`, are served; or it made none."""
        self._is_stepping = self._gave_up = False
        self.version = version
        if self._rules.schedule == "sync":
            self._end("served")

    def close(self) -> None:
        """Training stops: no request waits any longer."""
        self._is_stepping = False
        self._end("stopped")

    def metrics(self) -> dict[str, float]:
        """Since the last call: seconds for which generation was held, and holds by their end; and
        both since this process began. Empty if the schedule never holds.
        """
        if not self._rules.holds_generation:
            return {}
        self._total_s += self._held_s
        self._total_holds += self._ends.total()
        found = {
            "hold/seconds": self._held_s,
            "hold/holds": float(self._ends.total()),
            "hold/total_seconds": self._total_s,
            "hold/total_holds": float(self._total_holds),
        }
        found |= {f"hold/ended_{end}": float(number) for end, number in self._ends.items()}
        self._held_s = 0.0
        self._ends.clear()
        return found

    async def watch(self) -> None:
        """Until cancelled: check whether a hold must end and, with `step_off`, begin."""
        while self._rules.holds_generation:
            if self._order is not None and self._stop_file.exists():
                self._end("stopped")
            elif self._order is not None and time.time() >= self._order.until:
                self._end("max_hold")
                self._gave_up = True
            elif self._rules.schedule == "step_off":
                try:
                    await self._limit()
                except StoreError as error:
                    logger.warning("it is not known how far generation is ahead: %s", error)
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _limit(self) -> None:
        steps_off = self._rules.steps_off
        assert steps_off is not None
        most = self._batch_size * (steps_off + 1)
        untrained = await self._store.untrained(most)
        ahead = self._expected(untrained) + self._batch_size * self._is_stepping
        if admit(ahead + 1, self._batch_size, 0, steps_off):
            self._end("room")
        elif not self._stop_file.exists():
            self._begin(
                f"{ahead} samples are ahead of training, which trains {self._batch_size} per "
                f"step (trainer.schedule step_off, steps_off {steps_off})",
            )

    def _expected(self, untrained: Untrained) -> int:
        """How many of these turns will probably train."""
        rate = 1.0 if self.accept_rate is None else self.accept_rate
        return untrained.accepted + round(rate * untrained.judging)

    def _begin(self, why: str) -> None:
        if self._order is not None or self._gave_up:
            return
        now = time.time()
        self._order = HoldOrder(
            version=self.version, why=why, since=now, until=now + self._rules.max_hold_s
        )
        self._file.write(self._order)
        logger.info("generation is held: %s", why)

    def _end(self, end: End) -> None:
        if self._order is None:
            return
        self._file.remove()
        held_s = time.time() - self._order.since
        self._order = None
        self._held_s += held_s
        self._ends[end] += 1
        if end == "max_hold":
            logger.warning(
                "generation was held for %.1f s and resumes before the step is done: it took "
                "longer than trainer.max_hold_s",
                held_s,
            )
        else:
            logger.info("generation resumes after %.1f s: %s", held_s, end)
