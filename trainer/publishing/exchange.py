"""Exchanging the weights of one engine: pause, empty its cache, load, resume."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol

from records.database import fail_points
from rollout_bridge.engine.errors import EngineRejected
from rollout_bridge.engine.types import PauseMode

logger = logging.getLogger(__name__)

_FLUSHES = 6
_FLUSH_WAIT_S = 0.1
"""Doubled each time: 3.1 s in all, in which the engine answers."""


class WeightHolder(Protocol):
    """The part of the engine client that an exchange of weights uses."""

    async def update_weights(self, path: str, version: str, *, flush_cache: bool) -> Any:
        """Load the folder `path` and serve it as `version`. With `flush_cache` an engine may refuse
        after it has changed its weights.
        """
        ...

    async def flush_cache(self) -> Any:
        """Forget cached prefixes; raises EngineRejected while requests stand in the way."""
        ...

    async def pause(self, mode: PauseMode) -> Any:
        """Hold requests back; `mode` says what becomes of running ones."""
        ...

    async def resume(self) -> Any:
        """Let requests in again."""
        ...


async def exchange_weights(
    engine: WeightHolder, path: str, version: int, *, mode: PauseMode
) -> None:
    """Load the folder `path` as `version`. Whatever happens, the engine goes on. Raises
    EngineError.
    """
    try:
        if mode == "in_place":
            await engine.pause(mode)
        else:
            await _pause_empty(engine, mode)
        # Emptied before, not by this call: an engine that may not forget its cache refuses only
        # after it has changed its weights, and would go on from what the older ones computed.
        await engine.update_weights(path, str(version), flush_cache=False)
        fail_points.reach("publish.loaded")
    finally:
        # Also where the pause itself failed, since it may have reached the engine; and through a
        # cancellation, since an engine that stays paused answers nobody.
        await asyncio.shield(engine.resume())


async def _pause_empty(engine: WeightHolder, mode: PauseMode) -> None:
    """Pause an engine, with nothing in its cache.

    SGLang forgets nothing while a request's grammar is being compiled, and finishes that only while
    it runs. So it runs on for a moment, with the weights that it has.
    """
    for attempt in range(_FLUSHES):
        await engine.pause(mode)
        try:
            await engine.flush_cache()
            return
        except EngineRejected as refusal:
            if attempt + 1 == _FLUSHES:
                raise
            logger.info("an engine does not empty its cache yet: %s", refusal.message)
        await engine.resume()
        await asyncio.sleep(_FLUSH_WAIT_S * 2**attempt)
