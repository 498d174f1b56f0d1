"""The process of the endpoint: read the configuration, connect its parts, serve until told to stop.

Started by hand, it first checks what a command has checked that starts it as a child.
"""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.commands.keys import refuse_open_door
from opd.processes.beginning import begin
from opd.processes.shared import client_of, policy_client, rendering_of
from opd.run.config import RunConfig
from opd.run.start_checks import check_listening, check_spill, check_store, check_traces
from records.store import Store
from rollout_bridge import tracing
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from rollout_bridge.engine.client import EngineClient

logger = logging.getLogger(__name__)


def run_proxy(config_file: Path, overrides: list[str], exit_with_parent: bool) -> None:
    """The OpenAI-compatible endpoint."""
    config = begin(config_file, overrides, exit_with_parent)
    if not exit_with_parent:
        check_listening("proxy", config.proxy.host, config.proxy.port)
        check_store(config.store)
        check_traces()
    check_spill(config.store)
    from api_proxy.server.event_loop import run

    with tracing.sending("proxy"):
        run(_serve_proxy(config, config_file))


async def _serve_proxy(config: RunConfig, config_file: Path) -> None:
    from api_proxy.app import ProxyDeps, create_app
    from api_proxy.server.server import ProxyServer
    from opd.report.curves import RunCurves
    from opd.report.hint_versions import hint_versions
    from opd.report.metrics_file import FOLDER
    from opd.status.command import with_health
    from opd.status.facts import read_now
    from rollout_bridge.engine.hold_file import HoldFile
    from rollout_bridge.stop_order import why_stopped

    async with await Store.open(config.store) as store:
        await refuse_open_door(config, store, config_file)
        rendering = rendering_of(config)

        async def run_status() -> dict[str, Any]:
            return with_health(await read_now(config, config_file.parent, store))

        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(policy_client(config, config_file.parent))
            teacher = _asked_by_pages(config)
            if teacher is not None:
                await stack.enter_async_context(teacher)
            deps = ProxyDeps(
                store=store,
                engine=client,
                rendering=rendering,
                config=config.proxy,
                pause_mode=config.trainer.pause_mode,
                metrics_folder=config_file.parent / FOLDER,
                hold=HoldFile(config_file.parent) if config.trainer.holds_generation else None,
                waiting=config.waiting,
                routes=config.scoring.routes,
                hint_versions=partial(hint_versions, config_file.parent),
                teacher=teacher,
                run_status=run_status,
                curves=RunCurves(config_file.parent),
                why_stopped=partial(why_stopped, config_file.parent),
            )
            await ProxyServer(create_app(deps), config.proxy).serve()


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
