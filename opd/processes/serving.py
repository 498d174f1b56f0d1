"""A run that serves: its processes from start to stop, and now and then a line on where the agents'
turns stand. Composition only.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from rich.console import Console

from opd.commands.keys import refuse_open_door
from opd.plan.said import serve_line
from opd.processes.beginning import log_to
from opd.processes.roles.proxy_workers import workers_warnings
from opd.processes.run import Run
from opd.rehearsal.saying import LearningLine
from opd.report.terminal.at_work import LINE_EVERY_S
from opd.report.terminal.held import held_line
from opd.report.terminal.log_notices import LogNotices, say_notices
from opd.report.terminal.status import status_line
from opd.report.terminal.step_lines import StepLines
from opd.run import config as run_config
from opd.run import recipe
from opd.run.checks import run_warnings
from opd.run.config import RunConfig
from records.store import Store

STATUS_EVERY_S = LINE_EVERY_S
STEP_LOOK_EVERY_S = 2.0
REPORT_EVERY_S = 300.0


def serve(config: RunConfig, folder: Path) -> None:
    """Start everything in `folder` and stay until SIGINT or SIGTERM."""
    log_to(folder / "logs" / "serve.log")
    asyncio.run(_serve(config, folder))


async def _serve(config: RunConfig, folder: Path) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    console = Console()
    await until_stopped(stop, _keep_serving(config, folder, console))
    console.print("stopped")


async def until_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until it ends or `stop` is set, and then until it has cleaned up.

    Starting a large model takes minutes, and a Ctrl-C meanwhile must not wait for them.
    """
    working, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait([working, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if working.done():
        working.result()
        return
    working.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await working


def _renderer_warnings(config: RunConfig) -> list[str]:
    """What requests of this run cost, and what they cannot show to its model."""
    from opd.models.renderer_notes import renderer_note, template_notes
    from rollout_bridge.rendering.rendering import Rendering

    rendering = Rendering.load(config.model, config.renderer)
    note = renderer_note(rendering, config.renderer)
    lines = [("renderer: " + note.found, note.remedy)]
    lines += [(one.found, one.remedy) for one in template_notes(rendering)]
    return [found if remedy is None else f"{found}; {remedy}" for found, remedy in lines]


async def _keep_serving(config: RunConfig, folder: Path, console: Console) -> None:
    if config.renderer.name == "default":
        for warning in await asyncio.to_thread(_renderer_warnings, config):
            console.print(f"[yellow]{warning}[/]", highlight=False, soft_wrap=True)
    console.print(serve_line(config), highlight=False, soft_wrap=True)
    await _refuse_open_door(config, folder)
    for warning in (*run_warnings(config.trainer), *workers_warnings(config.proxy)):
        console.print(f"[yellow]{warning}[/]", soft_wrap=True)
    console.print(f"run folder [bold]{folder}[/]; starting engines with {config.model}")
    async with Run(config, folder) as run, await Store.open(config.store) as store:
        await run.start_endpoint()
        address = f"http://{config.proxy.host}:{config.proxy.port}/v1"
        workers = config.proxy.workers
        by = "" if workers == 1 else f", served by {workers} workers"
        console.print(f"ready: point an OpenAI client at [bold]{address}[/]{by} (Ctrl-C stops)")
        try:
            await run.start_learners()
            for warning in run.calibration_warnings():
                console.print(f"[yellow]{warning}[/]", highlight=False, soft_wrap=True)
            console.print("learning: judge and trainer work on what comes in")
            console.print(recipe.said(config), highlight=False, soft_wrap=True)
            await _report_while_serving(run, store, folder, console)
        finally:
            await _write_report(config, folder, store, console)


async def _refuse_open_door(config: RunConfig, folder: Path) -> None:
    """Check before anything is started. The configuration is written, so that `opd keys` can read
    it.
    """
    config_file = folder / "config.toml"
    run_config.save(config, config_file)
    async with await Store.open(config.store) as store:
        await refuse_open_door(config, store, config_file)


async def _report_while_serving(run: Run, store: Store, folder: Path, console: Console) -> None:
    """Print a line per step and now and then a status, and write the report, until cancelled or
    something fails.
    """
    drawn = time.monotonic()
    learning, notices = LearningLine(store, folder), LogNotices(folder / "logs")
    steps, said_at, said = StepLines(folder), drawn, ""
    while True:
        await asyncio.wait([run.supervisor.failed], timeout=STEP_LOOK_EVERY_S)
        if run.supervisor.failed.done():
            run.supervisor.failed.result()
        for line in steps.new():
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        if time.monotonic() - said_at > STATUS_EVERY_S:
            said_at = time.monotonic()
            said = await say_how_it_stands(store, learning, notices, console, said)
            if (held := held_line(folder)) is not None:
                console.print(held, markup=False, highlight=False, soft_wrap=True)
        if time.monotonic() - drawn > REPORT_EVERY_S:
            drawn = time.monotonic()
            await _write_report(run.config, folder, store, console)


async def say_how_it_stands(
    store: Store, learning: LearningLine, notices: LogNotices, console: Console, before: str = ""
) -> str:
    """Print where turns and hints stand, unless that equals `before`, and what the run's processes
    have warned of since. Returns where they stand.
    """
    lines = [await status_line(store), await learning.said()]
    said = "\n".join(line for line in lines if line is not None)
    if said != before:
        console.print(said, markup=False, highlight=False, soft_wrap=True)
    say_notices(notices, console)
    return said


async def _write_report(config: RunConfig, folder: Path, store: Store, console: Console) -> None:
    """Curves, the plots of rollout correction, and trained turns, in the run folder."""
    # Imported here, so that drawing does not delay the start.
    from opd.report.run_report import write_run_report
    from rollout_bridge.rendering.rendering import Rendering

    rendering = await asyncio.to_thread(Rendering.load, config.model, config.renderer)
    path = await write_run_report(folder, f"Serving {config.model}", store, rendering)
    console.print(f"report: [bold]{path}[/]")
