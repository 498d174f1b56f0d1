"""What several of a run's processes share: clients of its engines, its rendering, their names.

A process holds nothing that matters: it can be killed at any instruction and started again with the
same arguments.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.rehearsal.saying import LearningLine
from opd.report.terminal.at_work import LINE_EVERY_S
from opd.report.terminal.held import held_line
from opd.report.terminal.status import status_line
from opd.run.config import EngineConfig, RunConfig
from records.store import Store
from trainer.model.model_config import model_vocab_size

if TYPE_CHECKING:
    from rollout_bridge.engine.client import EngineClient
    from rollout_bridge.engine.served import ServedFile
    from rollout_bridge.rendering.rendering import Rendering

logger = logging.getLogger(__name__)


async def with_status(
    config: RunConfig, folder: Path, is_child: bool, work: Coroutine[Any, Any, None]
) -> None:
    """Do the work, and log every minute where turns and hints stand; for a child, its parent does
    that.
    """
    if is_child:
        await work
        return
    async with await Store.open(config.store) as store:
        learning = LearningLine(store, folder)

        async def say() -> None:
            while True:
                await asyncio.sleep(LINE_EVERY_S)
                logger.info("%s", await status_line(store))
                if (held := held_line(folder)) is not None:
                    logger.info("%s", held)
                if (said := await learning.said()) is not None:
                    logger.info("%s", said)

        saying = asyncio.create_task(say())
        try:
            await work
        finally:
            saying.cancel()
            await asyncio.gather(saying, return_exceptions=True)


def rendering_of(config: RunConfig) -> Rendering:
    """How the run's model reads conversations."""
    from rollout_bridge.rendering.rendering import Rendering

    return Rendering.load(config.model, config.renderer)


def policy_client(config: RunConfig, folder: Path, *, priority: int = 0) -> EngineClient:
    """The policy's engine, asked for the version that the run in `folder` serves."""
    from rollout_bridge.engine.served import ServedFile

    return client_of(config, config.policy, ServedFile(folder), priority=priority)


def client_of(
    config: RunConfig,
    engine: EngineConfig,
    served: ServedFile | None = None,
    *,
    priority: int = 0,
) -> EngineClient:
    """A client of one of the run's engines."""
    from rollout_bridge.engine.client import EngineClient

    return EngineClient(
        engine.base_url,
        config=config.engine_client,
        vocab_size=model_vocab_size(config.model),
        keys=engine.keys,
        priority=priority,
        served=served,
    )


def owner_name(worker: str) -> str:
    """Name under which this process claims turns: unique, and readable in the store."""
    return f"{worker}@{socket.gethostname()}:{os.getpid()}"
