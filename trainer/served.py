"""The version that the engines are to serve: the newest, or an older one that RUN/stop orders.

Publishing at start and after a step, repairing, and obeying an order all ask here, so that an
engine that comes back never gets a version that training was stopped for.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint import Checkpoints
from trainer.manifest import Manifest
from trainer.publish import Publisher
from trainer.stop_order import STOP_FILE, read_stop

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A version, and what an engine loads to serve it."""

    version: int
    path: str


class Served:
    """Brings the engines to the version that is to serve; `newest` is the newest step."""

    def __init__(self, folder: Path, checkpoints: Checkpoints, publisher: Publisher) -> None:
        self._folder, self._checkpoints, self._publisher = folder, checkpoints, publisher
        self.chosen: Weights | None = None
        """What the engines were last brought to, as far as they answered."""

    def wanted(self, newest: Manifest) -> Weights:
        """What RUN/stop orders, where its weights are kept; else the newest."""
        order = read_stop(self._folder)
        ordered = None if order is None else order.serve_version
        if ordered is not None and ordered != newest.version:
            path = self._checkpoints.kept_weights(ordered)
            if path is not None:
                return Weights(version=ordered, path=path)
        return Weights(version=newest.version, path=self._checkpoints.weights_path(newest))

    async def begin(self, newest: Manifest) -> None:
        """At start. A trained version is always published: its number may be another run's too."""
        self.chosen = weights = self.wanted(newest)
        if weights.version == 0:
            await self._publisher.repair(weights.path, 0)
        else:
            await self._publisher.publish(weights.path, weights.version)

    async def publish(self, newest: Manifest) -> None:
        """After a step."""
        self.chosen = weights = self.wanted(newest)
        await self._publisher.publish(weights.path, weights.version)

    async def repair(self, newest: Manifest) -> None:
        """Publish to the engines that serve something else, such as one that was restarted."""
        self.chosen = weights = self.wanted(newest)
        await self._publisher.repair(weights.path, weights.version)

    async def obey(self, newest: Manifest) -> None:
        """Say why training is to stop, and bring the engines to the version that is to serve."""
        order = read_stop(self._folder)
        if order is None or not order.reason:
            return
        logger.error("training has stopped: %s (delete %s to go on)", order.reason, STOP_FILE)
        self.chosen = weights = self.wanted(newest)
        if order.serve_version not in (None, weights.version):
            logger.error(
                "version %d is not kept: version %d serves on", order.serve_version, weights.version
            )
        if set(self._publisher.served.values()) != {weights.version}:
            await self._publisher.publish(weights.path, weights.version)
        if weights.version != newest.version:
            logger.error("version %d serves from here on", weights.version)
