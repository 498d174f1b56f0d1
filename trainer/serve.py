"""`opd serve`: the whole loop behind one endpoint until it is told to stop.

Composition only: builds the configuration, starts the run's processes, and prints once in a while
where the turns of the agents stand.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

from rich.console import Console

from records.store import Store
from records.types import TurnState
from trainer import run_config
from trainer.defaults import resolve, single_machine
from trainer.run import Run
from trainer.run_config import RunConfig

STATUS_EVERY_S = 30.0


def serve_forever(
    model: str,
    folder: Path,
    options: dict[str, Any],
    config_file: Path | None,
    overrides: list[str],
) -> None:
    """Start everything in `folder` and stay until SIGINT or SIGTERM."""
    folder.mkdir(parents=True, exist_ok=True)
    values = run_config.merge(single_machine(model, folder), options)
    config = resolve(values, config_file, overrides)
    asyncio.run(_serve(config, folder))


async def _serve(config: RunConfig, folder: Path) -> None:
    console = Console()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    console.print(f"run folder [bold]{folder}[/]; starting engines with {config.model}")
    async with Run(config, folder) as run, await Store.open(config.store) as store:
        await run.start_loop()
        address = f"http://{config.proxy.host}:{config.proxy.port}/v1"
        console.print(f"ready: point an OpenAI client at [bold]{address}[/] (Ctrl-C stops)")
        stopped = asyncio.create_task(stop.wait())
        while not stop.is_set():
            await asyncio.wait(
                [stopped, run.supervisor.failed],
                timeout=STATUS_EVERY_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if run.supervisor.failed.done():
                run.supervisor.failed.result()
            console.print(await status_line(store))
        console.print("stopping")


async def status_line(store: Store) -> str:
    """One line: where the turns stand and which version serves."""
    counts = await store.counts()
    drops = await store.drops()
    latest = await store.latest_version()
    shown = ", ".join(f"{counts.get(state, 0)} {state.value}" for state in TurnState)
    reasons = ", ".join(f"{count} {reason.value}" for reason, count in drops.items())
    version = latest.version if latest is not None else 0
    return f"policy version {version}; turns: {shown}" + (f" ({reasons})" if reasons else "")
