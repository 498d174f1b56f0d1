"""The process of the endpoint: read the configuration, connect its parts, serve until told to stop.

Started by hand, it first checks what a command has checked that starts it as a child. If the
endpoint has several workers, it starts them and serves nothing itself; a worker gets its number and
what it shares with the others from whoever started it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.commands.keys import refuse_open_door
from opd.processes.beginning import begin
from opd.processes.roles.proxy_workers import Worker, start_endpoint, workers_warnings
from opd.processes.shared import client_of, policy_client, rendering_of
from opd.processes.supervisor import Supervisor
from opd.run.config import RunConfig
from opd.run.start_checks import (
    check_listening,
    check_spill,
    check_spill_file,
    check_store,
    check_traces,
)
from records.store import Store
from rollout_bridge import tracing
from trainer.errors import ConfigError, StartupError

if TYPE_CHECKING:
    from api_proxy.sharing.sharing import Sharing
    from rollout_bridge.engine.client import EngineClient

logger = logging.getLogger(__name__)


_START_S = 300.0
"""Within this time, each worker answers."""
_STOP_S = 30.0
"""For a worker to end after its replies have."""


def run_proxy(
    config_file: Path, overrides: list[str], exit_with_parent: bool, worker: str | None = None
) -> None:
    """The OpenAI-compatible endpoint, or one of its workers."""
    own = None if worker is None else Worker.parse(worker)
    mark = "" if own is None else f"[worker {own.number}] "
    config = begin(config_file, overrides, exit_with_parent, mark)
    if not exit_with_parent:
        check_listening("proxy", config.proxy.host, config.proxy.port)
        check_store(config.store)
        check_traces()
    if own is None:
        check_spill(config.store)
    else:
        check_spill_file(config.store)
    if own is None and config.proxy.workers > 1:
        asyncio.run(_serve_by_workers(config, config_file, overrides))
        return
    from api_proxy.server.event_loop import run
    from api_proxy.sharing.sharing import OtherProgram, Sharing

    workers = config.proxy.workers
    try:
        sharing = Sharing.alone() if own is None else Sharing.join(own.memory, own.number, workers)
    except OtherProgram as error:
        raise StartupError(str(error)) from None
    sockets = None if own is None else [socket.socket(fileno=one) for one in own.sockets]
    with tracing.sending("proxy"):
        run(_serve_proxy(config, config_file, sharing, sockets))


async def _serve_by_workers(config: RunConfig, config_file: Path, overrides: list[str]) -> None:
    """Start the workers, keep them alive until a signal, and pass signals on. Raises StartupError
    if one gives up.
    """
    async with await Store.open(config.store) as store:
        await refuse_open_door(config, store, config_file)
    for warning in workers_warnings(config.proxy):
        logger.warning("%s", warning)
    stop = asyncio.Event()
    supervisor = Supervisor(None, stop_timeout_s=config.proxy.shutdown_grace_s + _STOP_S)

    def on_signal() -> None:
        if stop.is_set():
            supervisor.hurry()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    words = [word for one in overrides for word in ("--set", one)]
    arguments = ["-m", "opd.cli.app", "proxy", "--run", str(config_file), *words]
    stopped = asyncio.create_task(stop.wait())
    starting = asyncio.create_task(
        start_endpoint(supervisor, config.proxy, arguments, _START_S), name="workers"
    )
    try:
        await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            address = f"http://{config.proxy.host}:{config.proxy.port}/v1"
            logger.info("%d workers serve %s", config.proxy.workers, address)
            await asyncio.wait({stopped, supervisor.failed}, return_when=asyncio.FIRST_COMPLETED)
            if supervisor.failed.done():
                supervisor.failed.result()
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await supervisor.stop()
        stopped.cancel()


async def _serve_proxy(
    config: RunConfig,
    config_file: Path,
    sharing: Sharing,
    sockets: list[socket.socket] | None,
) -> None:
    """`sockets` are what a worker listens on, instead of its own."""
    from api_proxy.app import ProxyDeps, create_app
    from api_proxy.server.server import ProxyServer
    from api_proxy.server.worker_metrics import remove_of_others
    from opd.report.curves import RunCurves
    from opd.report.hint_versions import hint_versions
    from opd.report.metrics.metrics_file import FOLDER
    from opd.status.command import with_health
    from opd.status.facts import read_now
    from rollout_bridge.engine.hold_file import HoldFile
    from rollout_bridge.stop_order import why_stopped

    async with await Store.open(config.store) as store:
        await refuse_open_door(config, store, config_file)
        rendering = rendering_of(config)
        own, folder = config.proxy.share_of(sharing.number), config_file.parent
        if sharing.is_first:
            remove_of_others(folder / FOLDER, sharing.workers)

        async def run_status() -> dict[str, Any]:
            return with_health(await read_now(config, folder, store))

        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(policy_client(config, folder))
            teacher = _asked_by_pages(config)
            if teacher is not None:
                await stack.enter_async_context(teacher)
            deps = ProxyDeps(
                store=store,
                engine=client,
                rendering=rendering,
                config=own,
                pause_mode=config.trainer.pause_mode,
                metrics_folder=folder / FOLDER,
                hold=HoldFile(folder) if config.trainer.holds_generation else None,
                waiting=config.waiting,
                routes=config.scoring.routes,
                hint_versions=partial(hint_versions, folder),
                teacher=teacher,
                run_status=run_status,
                curves=RunCurves(folder),
                why_stopped=partial(why_stopped, folder),
                sharing=sharing,
            )
            await ProxyServer(create_app(deps), own).serve(sockets)


def _asked_by_pages(config: RunConfig) -> EngineClient | None:
    """The teacher; None for a stand-alone endpoint without a teacher engine."""
    from rollout_bridge.engine.types import BACKGROUND_PRIORITY

    if not config.frozen.is_set:
        return None
    try:
        return client_of(config, config.frozen, priority=BACKGROUND_PRIORITY)
    except ConfigError as error:
        logger.warning("pages cannot ask the teacher: %s", error)
        return None
