"""The version that the engines are to serve: the newest, or an older one that RUN/stop orders.

Publishing at start and after a step, repairing, and obeying an order all use this, so that an
engine that comes back never gets a version that training was stopped for.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from rollout_bridge.stop_order import STOP_FILE, read_stop
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.checkpoints.manifest import Manifest
from trainer.publishing.adapter_publish import AdapterPublisher
from trainer.publishing.publish import PublishedWeights, Publisher

logger = logging.getLogger(__name__)


class Served:
    """Brings the engines to the version that is to serve; `newest` is the newest step.
    `weights_of` says what an engine loads to serve a version whose weights are kept.
    """

    def __init__(
        self,
        folder: Path,
        checkpoints: Checkpoints,
        publisher: Publisher | AdapterPublisher,
        weights_of: Callable[[int], Awaitable[PublishedWeights]],
    ) -> None:
        self._folder, self._checkpoints, self._publisher = folder, checkpoints, publisher
        self._weights_of = weights_of
        self.chosen: int | None = None
        """The version that the engines were last brought to, as far as they answered."""

    def wanted(self, newest: Manifest) -> int:
        """What RUN/stop orders, where its weights are kept; else the newest."""
        order = read_stop(self._folder)
        ordered = None if order is None else order.serve_version
        is_there = ordered is not None and self._checkpoints.has_weights(ordered)
        return ordered if ordered is not None and is_there else newest.version

    async def begin(self, newest: Manifest) -> None:
        """At start. A trained version is always published: its number may be another run's too."""
        if self.wanted(newest) == 0:
            await self.repair(newest)
        else:
            await self.publish(newest)

    async def publish(self, newest: Manifest) -> None:
        """After a step."""
        self.chosen = version = self.wanted(newest)
        await self._publisher.publish(await self._weights_of(version))

    async def repair(self, newest: Manifest) -> None:
        """Publish to the engines that serve something else, such as one that was restarted."""
        self.chosen = version = self.wanted(newest)
        await self._publisher.repair(await self._weights_of(version))

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
