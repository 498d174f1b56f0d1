"""What each process of a run does: read the configuration, connect its parts, run until told to
stop.

One function a process. A process holds nothing that matters: it can be killed at any instruction
and started again with the same arguments.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from trainer import run_config
from trainer.run_config import ConfigError, RunConfig
from trainer.supervisor import watch_parent

if TYPE_CHECKING:
    pass

logger = logging.getLogger(__name__)


def run_engine(config_file: Path, role: str, overrides: list[str], exit_with_parent: bool) -> None:
    """The embedded engine of `role` ("policy" or "frozen")."""
    if role not in ("policy", "frozen"):
        raise ConfigError(f"--role {role}: must be policy or frozen")
    config = _begin(config_file, overrides, exit_with_parent)
    embedded = getattr(config, role).embedded
    if embedded is None:
        raise ConfigError(f"{role}.embedded: this run's {role} engine is not an embedded one")
    from rollout_bridge.embedded.server import serve

    serve(embedded)


def run_proxy(config_file: Path, overrides: list[str], exit_with_parent: bool) -> None:
    """The OpenAI-compatible endpoint."""
    config = _begin(config_file, overrides, exit_with_parent)
    from api_proxy.app import serve

    serve(config)


def owner_name(worker: str) -> str:
    """Name under which this process claims turns: unique, and readable in the store."""
    return f"{worker}@{socket.gethostname()}:{os.getpid()}"


def run_until_stopped(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Run `main(stop)` on a new event loop; SIGTERM and SIGINT set `stop`."""

    async def runner() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await main(stop)

    asyncio.run(runner())


def _begin(config_file: Path, overrides: list[str], exit_with_parent: bool) -> RunConfig:
    if exit_with_parent:
        watch_parent()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    return run_config.load(config_file, overrides)
