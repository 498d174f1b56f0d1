"""Leased turns get what their objective's support lacks, before the step that uses it: side samples
are drawn, scored and stored with their turns.

It decides no batch and takes no step. How tokens are drawn is in trainer/batch/side_sampling.py.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from records.names import DropReason
from records.store import Store
from records.types import ReadySample
from rollout_bridge.embedded.model.threads import in_thread
from rollout_bridge.worker import ServiceUnavailable
from trainer.batch.side_sampling import NamedScorers, scored_by_engine
from trainer.step.leasing import Leasing
from trainer.step.update import Updater

logger = logging.getLogger(__name__)

SCORED_AT_ONCE = 4
"""Turns whose side samples an engine scores at a time."""


class SideSampling:
    """Side samples of one trainer's batches; `teachers` score them where no model in the trainer
    does. Work on weights is done in `thread`, the trainer's own.
    """

    def __init__(
        self,
        *,
        store: Store,
        updater: Updater,
        leasing: Leasing,
        teachers: NamedScorers | None,
        thread: ThreadPoolExecutor,
    ) -> None:
        self._store, self._updater, self._leasing = store, updater, leasing
        self._teachers, self._thread = teachers, thread

    async def added(
        self, samples: list[ReadySample], staleness: Sequence[int]
    ) -> list[ReadySample] | None:
        """The samples with what they lacked, which is stored. None if an engine that teaches does
        not answer, or cannot score a turn, which is dropped: the batch is given back.
        """
        drawn = await in_thread(self._thread, self._updater.draw_side_samples, samples, staleness)
        found: Sequence[ReadySample | DropReason] = drawn
        if drawn and self._updater.plan.model is None:
            assert self._teachers is not None, "its maker gives it the engines that teach"
            try:
                found = await scored_by_engine(drawn, self._teachers, SCORED_AT_ONCE)
            except ServiceUnavailable as error:
                logger.warning(
                    "%d turns wait: a teacher did not score their side samples: %s",
                    len(drawn),
                    error,
                )
                await self._leasing.give_back()
                return None
        by_turn: dict[str, ReadySample] = {}
        for sample, scored in zip(drawn, found, strict=True):
            if isinstance(scored, DropReason):
                await self._leasing.drop(sample, scored)
                continue
            assert scored.side_samples is not None
            await self._store.save_side_samples(scored.turn_id, scored.side_samples)
            by_turn[scored.turn_id] = scored
        if len(by_turn) < len(drawn):
            await self._leasing.give_back()
            return None
        return [by_turn.get(sample.turn_id, sample) for sample in samples]
