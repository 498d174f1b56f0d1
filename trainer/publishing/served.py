"""The version that the engines are to serve: the newest, or an older one that RUN/stop orders.

Publishing at start and after a step, repairing, and obeying an order all use this, so that an
engine that comes back never gets a version that training was stopped for.

Where engines hold several adapters, a step of a guarded run is staged first: the one before it
serves until the guard has passed it. What a rollback restores has served before, and is not staged.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from rollout_bridge.guard.waiting import CheckWait
from rollout_bridge.stop_order import STOP_FILE, read_stop
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.checkpoints.manifest import Manifest
from trainer.publishing.adapter_publish import AdapterPublisher
from trainer.publishing.publish import PublishedWeights, Publisher

logger = logging.getLogger(__name__)


class Served:
    """Brings the engines to the version that is to serve; `newest` is the newest step.
    `weights_of` says what an engine loads to serve a version whose weights are kept, `check` what
    the guard says of it.
    """

    def __init__(
        self,
        folder: Path,
        checkpoints: Checkpoints,
        publisher: Publisher | AdapterPublisher,
        weights_of: Callable[[int], Awaitable[PublishedWeights]],
        check: CheckWait,
    ) -> None:
        self._folder, self._checkpoints, self._publisher = folder, checkpoints, publisher
        self._weights_of, self._check = weights_of, check
        self._stager = publisher if isinstance(publisher, AdapterPublisher) else None
        self.chosen: int | None = None
        """The version that the engines were last brought to, as far as they answered."""

    def wanted(self, newest: Manifest) -> int:
        """What RUN/stop orders, where its weights are kept; else the newest, or the one before it
        while the newest is staged.
        """
        order = read_stop(self._folder)
        ordered = None if order is None else order.serve_version
        if ordered is not None and self._checkpoints.has_weights(ordered):
            return ordered
        return self._before(newest) if self._is_staged(newest) else newest.version

    def _is_staged(self, newest: Manifest) -> bool:
        """Whether it must pass its check before it serves."""
        may_serve = newest.restores is not None or self._check.may_serve(newest.version)
        return self._stager is not None and not may_serve

    def _before(self, newest: Manifest) -> int:
        """What serves until `newest` may: no step is taken from a version that has not passed. If
        its weights were deleted, as the guard was off, the start does.
        """
        version = newest.parent_version
        assert version is not None, "the start is never staged"
        return version if self._checkpoints.has_weights(version) else 0

    async def begin(self, newest: Manifest) -> None:
        """At start. A trained version is always published: its number may be another run's too."""
        if self._check.is_on:
            when = "serves while it is checked: engines hold one set of full weights"
            if self._stager is not None:
                when = "is checked before it serves, next to the one before it"
            logger.info("guard: each version %s", when)
        if self._is_staged(newest):
            logger.info(
                "version %d serves until version %d is checked", self.wanted(newest), newest.version
            )
        if self.wanted(newest) == 0:
            await self.repair(newest)
        else:
            await self.publish(newest)

    async def publish(self, newest: Manifest) -> None:
        """After a step."""
        await self._bring(newest, self._publisher.publish)

    async def repair(self, newest: Manifest) -> None:
        """Publish to the engines that serve something else, such as one that was restarted."""
        await self._bring(newest, self._publisher.repair)

    async def awaits_check(self, newest: Manifest) -> bool:
        """Whether `newest` is staged; while training goes on, that is logged every minute. Once it
        has passed, it is published.
        """
        if self._is_staged(newest):
            if read_stop(self._folder) is None:
                self._check.awaits(newest.version, served=self.wanted(newest))
            return True
        if self._stager is not None and self._stager.has_staged:
            logger.info("version %d passed its check", newest.version)
            await self.publish(newest)
        return False

    async def _bring(
        self, newest: Manifest, publish: Callable[[PublishedWeights], Awaitable[object]]
    ) -> None:
        is_staged = self._is_staged(newest)
        if self._stager is not None and is_staged:
            await self._stager.stage(await self._weights_of(newest.version))
        self.chosen = version = self.wanted(newest)
        await publish(await self._weights_of(version))
        # Last: what is neither staged nor served is unloaded.
        if self._stager is not None and not is_staged:
            self._stager.unstage()

    async def obey(self, newest: Manifest) -> None:
        """Say why training is to stop, and bring the engines to the version that is to serve."""
        order = read_stop(self._folder)
        if order is None or not order.reason:
            return
        logger.error("training has stopped: %s (delete %s to go on)", order.reason, STOP_FILE)
        self.chosen = version = self.wanted(newest)
        if order.serve_version not in (None, version):
            logger.error(
                "version %d is not kept: version %d is still served", order.serve_version, version
            )
        if set(self._publisher.served.values()) != {version}:
            await self.publish(newest)
        if version != newest.version:
            logger.error("version %d is served from now on", version)
