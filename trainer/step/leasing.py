"""Which batch is trained next: one leased from the store, or none while it is not full.

What is unusable or too old is dropped here, with its reason. It knows no weights and takes no step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from records.lessons.names import LessonDrop
from records.names import DropReason
from records.store import Store
from records.training.share import UNCAPPED
from records.training.staleness import oldest_allowed
from records.types import ReadySample
from rollout_bridge.guard.waiting import CheckWait
from rollout_bridge.holds import Holds
from rollout_bridge.rehearsal.mix import LessonMix
from trainer.config import TrainerConfig

logger = logging.getLogger(__name__)

FINISH_FILE = "finish"
"""No more turns will come: the rest is a last, smaller batch, then the trainer ends."""


class Leasing:
    """Batches for one trainer. `unusable` says why a sample cannot train, or None."""

    def __init__(
        self,
        *,
        store: Store,
        config: TrainerConfig,
        run_folder: Path,
        owner: str,
        lessons: LessonMix,
        holds: Holds,
        check: CheckWait,
        unusable: Callable[[ReadySample], DropReason | None],
    ) -> None:
        self._store, self._config, self._run_folder = store, config, run_folder
        self._owner, self._lessons, self._holds, self._check = owner, lessons, holds, check
        self._unusable = unusable

    async def batch(self, chain: Sequence[int]) -> list[ReadySample] | None:
        """A full batch of fresh, finite samples, or None while there is none; unusable ones are
        dropped with their reason. `chain` are all surviving versions, oldest first.
        """
        version = chain[-1]
        finishes, size = self.finishes, self._config.rollout_batch_size
        outcomes = self._config.outcomes(finishes=finishes)
        if outcomes is not None:
            await self._store.drop_without_outcome(outcomes)
        repeats = self._config.replay_times > 1
        num_turns = await self._store.ready_count(outcomes, repeats=repeats)
        if finishes:
            size = min(size, num_turns)
        if size == 0 or num_turns + await self._lessons.num_ready() < size:
            self._holds.no_batch()
            return None
        if self._check.awaits(version) or (
            not finishes and await self._lessons.awaits_measurement(version)
        ):
            self._holds.batch_is_full()
            return None
        await self.expire(chain)
        samples = await self._store.lease(
            owner=self._owner,
            count=size,
            ttl_s=self._config.lease_ttl_s,
            whole_sessions=self._config.whole_sessions,
            # At its end a run trains what there is, whatever its scope.
            share=UNCAPPED if finishes else self._config.share,
            lessons=self._lessons.shares(is_full=num_turns >= size, finishes=finishes),
            history=self._config.history,
            outcomes=outcomes,
            repeats=repeats,
        )
        if not samples:
            self._holds.no_batch()
            return None
        self._holds.batch_is_full()
        self._lessons.leased()
        reasons = {sample.turn_id: self._unusable(sample) for sample in samples}
        unusable = {turn_id: reason for turn_id, reason in reasons.items() if reason is not None}
        if not unusable:
            return samples
        for sample in samples:
            if sample.turn_id in unusable:
                await self.drop(sample, unusable[sample.turn_id])
        await self.give_back()
        return None

    async def give_back(self) -> None:
        """What is leased waits for another batch."""
        await self._store.release_leases(self._owner)
        self._holds.no_batch()

    async def drop(self, sample: ReadySample, reason: DropReason) -> None:
        """A leased turn or lesson -> dropped."""
        if sample.lesson is None:
            await self._store.drop(self._owner, sample.turn_id, reason)
        else:
            await self._store.drop_lesson(self._owner, sample.turn_id, LessonDrop(reason.value))

    async def expire(self, chain: Sequence[int]) -> None:
        """Drop samples of versions that are too old for the next step."""
        oldest = oldest_allowed(chain, self._config.staleness_bound)
        expired = await self._store.expire_stale(oldest_allowed=oldest)
        if expired:
            logger.info("%d ready turns expired as stale", expired)
        expired = await self._store.expire_lessons(oldest_allowed=oldest)
        if expired:
            logger.info("%d lessons expired as stale", expired)

    @property
    def finishes(self) -> bool:
        """Whether no more turns will come."""
        return (self._run_folder / FINISH_FILE).exists()

    async def is_through(self) -> bool:
        """Whether no more turns will come and none is left."""
        if not self.finishes:
            return False
        return await self._store.ready_count(repeats=self._config.replay_times > 1) == 0
