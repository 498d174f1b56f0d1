"""A run of the tool lab: measure, learn, measure again, leave a folder that shows what happened.

The packages for measuring (torch) and drawing are imported where they are used.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from examples.tool_lab.evaluate import Rate
from examples.tool_lab.lab_config import LabConfig
from examples.tool_lab.learning import LearningState, learn
from examples.tool_lab.terminal import LearningProgress
from opd.processes.run import Run
from opd.report.terminal.log_notices import notices_said
from opd.report.terminal.progress import ProgressBar
from opd.run.checks import run_warnings
from opd.run.config import RunConfig
from records.store import Store
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.hold_file import HoldFile
from rollout_bridge.engine.served import ServedFile
from rollout_bridge.guard.checks import read_checks
from rollout_bridge.guard.waiting import LAST_CHECK_S
from rollout_bridge.rendering.rendering import Rendering
from rollout_bridge.stop_order import read_stop, why_stopped
from trainer.errors import StartupError

if TYPE_CHECKING:
    from examples.tool_lab.measure import Answered


async def measured_run(lab: LabConfig, config: RunConfig, folder: Path) -> dict[str, Any]:
    """The lab in `folder`, from engines to results; returns the summary that it writes there."""
    from examples.tool_lab.results import build_summary, print_results, save_results

    console = Console()
    started = time.monotonic()
    for warning in run_warnings(config.trainer):
        console.print(f"[yellow]{warning}[/]")
    console.print(f"run folder [bold]{folder}[/]; starting two engines with the lab's model")
    rendering = Rendering.load(config.model, config.renderer)
    judge = ["-m", "examples.tool_lab", "judge", "--hints", lab.hints]
    timings: dict[str, float] = {}
    async with (
        Run(config, folder, judge_command=judge) as processes,
        await Store.open(config.store) as store,
        EngineClient(
            config.policy.base_url,
            config=config.engine_client,
            vocab_size=rendering.vocab_size,
            keys=config.policy.keys,
            served=ServedFile(folder),
        ) as engine,
        notices_said(console, folder / "logs"),
    ):
        await processes.start_engines()
        timings["starting engines"] = time.monotonic() - started
        before = await _measure(console, "before", engine, rendering, lab, timings)
        said_before = await _examples(engine, rendering, lab)
        loop_started = time.monotonic()
        await asyncio.gather(processes.start_proxy(), processes.start_learning())
        timings["starting the loop"] = time.monotonic() - loop_started
        for warning in processes.calibration_warnings():
            console.print(f"[yellow]{warning}[/]", highlight=False, soft_wrap=True)
        state = await _learn(console, config, lab, store, processes, timings)
        if config.guard.is_on:
            await _last_check(engine, store, folder)
        await processes.supervisor.stop("proxy", "judge", "trainer")
        version = await served_version(engine, store, folder)
        after = await _measure(console, "after", engine, rendering, lab, timings)
        said = list(zip(said_before, await _examples(engine, rendering, lab), strict=True))
        gap = await _measure_gap(config, lab, version, folder, timings)
        timings["everything"] = time.monotonic() - started
        summary = await build_summary(config, lab, store, state, before, after, gap, timings)
        await save_results(folder, summary, store, rendering, before, after, said)
    print_results(console, summary, before, after, folder)
    return summary


async def _last_check(engine: EngineClient, store: Store, folder: Path) -> None:
    """Wait until the newest version is served, which needs its check, or training stops."""
    until = time.monotonic() + LAST_CHECK_S
    while time.monotonic() < until and read_stop(folder) is None:
        latest = await store.latest_version()
        served = (await engine.model_info()).weight_version
        if served == str(0 if latest is None else latest.version):
            return
        await asyncio.sleep(1.0)


async def served_version(engine: EngineClient, store: Store, folder: Path) -> int:
    """The newest version, the one that a stopped training went back to, or, with a guard, the
    newest that passed: the trainer may have ended between a step and its check. Raises StartupError
    if the engine serves another: it was restarted after the trainer had ended, and the start would
    be measured.
    """
    latest, order = await store.latest_version(), read_stop(folder)
    expected = [latest.version if latest is not None else 0]
    expected += [row.version for row in read_checks(folder) if not row.breaches][-1:]
    if order is not None and order.serve_version is not None:
        expected.append(order.serve_version)
    served = (await engine.model_info()).weight_version
    for version in expected:
        if served == str(version):
            return version
    raise StartupError(
        f"the policy engine serves version {served} and not the trained {expected[0]}: it was "
        "restarted after training (see its log); run the lab again"
    )


async def _measure(
    console: Console,
    when: str,
    engine: EngineClient,
    rendering: Rendering,
    lab: LabConfig,
    timings: dict[str, float],
) -> dict[str, Rate]:
    from examples.tool_lab.measure import measure_policy

    begun = time.monotonic()
    with ProgressBar(console, f"measuring {when}", "answers") as shown:
        rates = await measure_policy(
            engine,
            rendering,
            samples=lab.eval_samples,
            seed=lab.seed,
            kinds=lab.preferences,
            progress=shown.update,
        )
    timings[f"measuring {when}"] = time.monotonic() - begun
    return rates


async def _examples(engine: EngineClient, rendering: Rendering, lab: LabConfig) -> list[Answered]:
    from examples.tool_lab.measure import example_answers

    return await example_answers(engine, rendering, seed=lab.seed, kinds=lab.preferences)


async def _measure_gap(
    config: RunConfig, lab: LabConfig, version: int, folder: Path, timings: dict[str, float]
) -> dict[str, dict[str, float]]:
    """The gap to the hinted teacher, for the start and for the version that is served."""
    from examples.tool_lab.gap import measure_gap, weights_of

    begun = time.monotonic()
    gap = {}
    with weights_of(folder, version, config.model) as trained:
        for when, weights in (("before", config.model), ("after", trained)):
            gap[when] = await asyncio.to_thread(
                measure_gap, weights, config.model, lab.preferences, lab.seed
            )
    timings["measuring the gap"] = time.monotonic() - begun
    return gap


async def _learn(
    console: Console,
    config: RunConfig,
    lab: LabConfig,
    store: Store,
    processes: Run,
    timings: dict[str, float],
) -> LearningState:
    held = HoldFile(processes.folder)
    with LearningProgress(console, lab) as shown:
        state = await learn(
            base_url=f"http://{config.proxy.host}:{config.proxy.port}/v1",
            model=config.proxy.model_name,
            store=store,
            lab=lab,
            batch_size=config.trainer.rollout_batch_size,
            failed=processes.supervisor.failed,
            why_stopped=partial(why_stopped, processes.folder),
            is_held=lambda: held.holds() is not None,
            progress=shown.show,
        )
    timings["learning"] = state.seconds
    return state
