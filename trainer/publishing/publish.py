"""Bringing new weights to the engines: pause, load, resume.

Requests wait while weights change and are never refused: admission resumes whatever happens to the
load. An engine that fails keeps what it serves (its turns say so by their version) and is tried
again. It knows engines only as `WeightTarget`, and versions only as numbers.

The pause mode says what becomes of running requests (docs/weight_updates.md). Only `in_place` keeps
the engine's cache: in the other modes weights change only once the cache is empty. An engine that
this trainer has not published to before is always emptied (by `retract` then), so that everything
it computes from then on is from the weights it names.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rollout_bridge.engine.errors import EngineError
from rollout_bridge.engine.types import PauseMode
from trainer.publishing.exchange import WeightHolder, exchange_weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedWeights:
    """A version, the folder that an engine loads to serve it, and the adapter's name if the folder
    holds one.
    """

    version: int
    path: str
    adapter: str | None = None


class WeightTarget(WeightHolder, Protocol):
    """The part of the engine client that publication uses."""

    async def model_info(self) -> Any:
        """Contains, as `weight_version`, what is served."""
        ...


class Publisher:
    """Keeps every engine at the newest version, and knows what each one serves."""

    def __init__(
        self,
        engines: Mapping[str, WeightTarget],
        *,
        mode: PauseMode = "retract",
        attempts: int = 3,
        backoff_s: float = 0.5,
    ):
        self._engines = engines
        self._mode: PauseMode = mode
        self._attempts = attempts
        self._backoff_s = backoff_s
        self.served: dict[str, int | None] = dict.fromkeys(engines)
        """Version each engine last confirmed; None before the first confirmation."""

    async def publish(self, weights: PublishedWeights) -> list[str]:
        """Load `weights` into all engines at once. Returns the names that failed."""
        names, (path, version) = list(self._engines), (weights.path, weights.version)
        done = await asyncio.gather(*(self._publish_to(name, path, version) for name in names))
        return [name for name, success in zip(names, done, strict=True) if not success]

    async def repair(self, weights: PublishedWeights) -> list[str]:
        """Publish to the engines that serve something else, such as one that was restarted.

        Returns the names of engines that do not serve that version afterwards.
        """
        names, (path, version) = list(self._engines), (weights.path, weights.version)
        done = await asyncio.gather(*(self._repair_one(name, path, version) for name in names))
        return [name for name, success in zip(names, done, strict=True) if not success]

    async def close(self) -> None:
        """Nothing runs in the background here."""

    async def _repair_one(self, name: str, path: str, version: int) -> bool:
        try:
            info = await self._engines[name].model_info()
        except EngineError as error:
            logger.warning("engine %s does not say what it serves: %s", name, error)
            self.served[name] = None
            return False
        if info.weight_version == str(version):
            return self.served[name] == version or await self._resume(name, version)
        logger.info(
            "engine %s serves version %s, not %d: publishing", name, info.weight_version, version
        )
        return await self._publish_to(name, path, version, attempts=1)

    async def _resume(self, name: str, version: int) -> bool:
        """Let requests into an engine that has the weights, though this process did not see it
        resume.

        A trainer that was killed, or answers that got lost, may have left it paused.
        """
        try:
            await self._engines[name].resume()
        except EngineError as error:
            logger.warning("engine %s may still be paused: %s", name, error)
            return False
        self.served[name] = version
        return True

    async def _publish_to(
        self, name: str, path: str, version: int, attempts: int | None = None
    ) -> bool:
        total = self._attempts if attempts is None else attempts
        for attempt in range(total):
            try:
                await self._load(name, path, version)
            except EngineError as error:
                logger.warning(
                    "engine %s: loading version %d failed (%d of %d): %s",
                    name,
                    version,
                    attempt + 1,
                    total,
                    error,
                )
                if attempt + 1 < total:
                    await asyncio.sleep(self._backoff_s * 2**attempt)
            else:
                self.served[name] = version
                return True
        return False

    async def _load(self, name: str, path: str, version: int) -> None:
        is_first = self.served[name] is None
        mode = "retract" if is_first and self._mode == "in_place" else self._mode
        await exchange_weights(self._engines[name], path, version, mode=mode)
