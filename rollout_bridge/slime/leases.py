"""Steps that slime was given but no checkpoint contains yet: their leases, and when they end.

If hints are practised, a step ends once its weights are served: the next lessons are made when none
is leased, and its version is measured, so the store must know it. A job that loses it marks it as
abandoned when it resumes.

Each step has its own owner, so that a lease whose answer was lost can be given back alone.
"""

from __future__ import annotations

import asyncio
import logging

from records.errors import StoreConflict, StoreUnavailable
from records.store import Store
from rollout_bridge.slime.handovers import Handover
from rollout_bridge.slime.saved import tracked_rollout
from rollout_bridge.slime.settings import SlimeSettings

logger = logging.getLogger(__name__)

_HOLD_INTERVAL_S = 60.0


class HeldSteps:
    """The steps of a job between their handover and the checkpoint that contains them, or with
    lessons their serving.
    """

    def __init__(self, store: Store, settings: SlimeSettings) -> None:
        self._store = store
        self._settings = settings
        self._steps: dict[str, Handover] = {}
        """By the owner of their leases."""
        self._saved_rollout = -1
        self._served_rollout = -1
        self._lock = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, owner: str, step: Handover) -> None:
        """Add a step that was handed over on leases of `owner`."""
        self._steps[owner] = step

    async def extend(self) -> None:
        """Mark what checkpoints contain, and extend all other leases by `lease_ttl_s`, even those
        past their deadline.

        Raises StoreConflict if another trainer took any.
        """
        # If the answer to a mark was lost, its leases are gone, but no other trainer took them.
        await self._mark()
        async with self._lock:
            for owner, step in self._steps.items():
                held = await self._store.extend_leases(owner, self._settings.lease_ttl_s)
                given = len(step.turn_ids) + len(step.lesson_ids)
                if held != given:
                    raise StoreConflict(
                        f"version {step.version} was given {given} turns and lessons, but only "
                        f"{held} are still leased to it: another trainer works on this store; "
                        "stop it"
                    )

    async def saved(self, rollout_id: int) -> None:
        """slime has saved rollout `rollout_id`: mark its steps trained.

        Raises StoreUnavailable; `keep` tries again.
        """
        self._saved_rollout = max(self._saved_rollout, rollout_id)
        await self._mark()

    async def served(self, rollout_id: int) -> None:
        """The engines serve the weights of rollout `rollout_id`. Raises StoreUnavailable."""
        if self._settings.rehearsal is not None:
            self._served_rollout = max(self._served_rollout, rollout_id)
            await self._mark()

    async def keep(self) -> None:
        """Extend leases and mark what checkpoints contain, now and then, until cancelled.

        Raises StoreConflict if another trainer took any.
        """
        while True:
            await asyncio.sleep(min(self._settings.lease_ttl_s / 3, _HOLD_INTERVAL_S))
            try:
                await self.extend()
            except StoreUnavailable as error:
                logger.warning("leases are not extended: the store does not answer: %s", error)

    async def _mark(self) -> None:
        async with self._lock:
            done = max(self._rollout_on_disk(), self._served_rollout)
            for owner, step in list(self._steps.items()):
                if step.rollout_id <= done:
                    version = step.policy_version(self._settings.save_folder)
                    await self._store.commit_handed_over(
                        owner=owner,
                        version=version,
                        turn_ids=step.turn_ids,
                        lesson_ids=step.lesson_ids,
                    )
                    del self._steps[owner]

    def _rollout_on_disk(self) -> int:
        """The newest rollout that a whole checkpoint contains."""
        if not self._settings.is_async_save:
            return self._saved_rollout
        return min(self._saved_rollout, tracked_rollout(self._settings.save_folder))
