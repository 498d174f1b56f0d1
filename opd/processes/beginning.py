"""How each process of a run begins: its log, its files' permissions, its configuration; and how it
is told to stop.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

from api_proxy.server import request_ids
from opd.processes.supervisor import watch_parent
from opd.run import config as run_config
from opd.run.config import RunConfig
from records.database.private_files import UMASK, tighten_run

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(request)s%(message)s"
"""Read again by `opd.report.terminal.log_notices`."""

_WHILE_IMPORTING = (50_000, 20, 20)
"""Libraries make objects by the hundred thousand while they are imported, and those stay. Looking
for garbage among them after every 700, Python's own threshold, took a sixth of an engine's start.
"""
_USUAL = gc.get_threshold()


def begin(
    config_file: Path, overrides: list[str], exit_with_parent: bool, mark: str = ""
) -> RunConfig:
    """Set up this process, and read the run's configuration from `config_file`. Its messages in the
    log begin with `mark`.
    """
    if exit_with_parent:
        watch_parent()
    gc.set_threshold(*_WHILE_IMPORTING)
    log_to(None, mark)
    os.umask(UMASK)
    tighten_run(config_file.parent)
    return run_config.load(config_file, overrides)


def imported() -> None:
    """Everything that this process needs is imported: none of it is looked at for garbage again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_USUAL)


def log_to(file: Path | None, mark: str = "") -> None:
    """Append the log to a file, or write it to standard error, which is a terminal or a log."""
    if file is not None:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    marked = LOG_FORMAT.replace("%(request)s", f"{mark}%(request)s")
    logging.basicConfig(level=logging.INFO, format=marked, filename=file)
    for handler in logging.getLogger().handlers:
        handler.addFilter(request_ids.mark)
    # One line for each request to a judge would bury everything else.
    for name in ("httpx", "httpx2", "openai"):
        logging.getLogger(name).setLevel(logging.WARNING)


def run_until_stopped(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Run `main(stop)` on a new event loop; SIGTERM and SIGINT set `stop`."""

    async def runner() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await main(stop)

    asyncio.run(runner())
