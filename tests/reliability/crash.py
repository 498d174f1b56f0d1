"""Kills the processes of a run again and again while agents talk; nothing may be lost by it.

    python -m tests.reliability.crash --kills 500

Engines, proxy, judge worker and trainer are real processes with the tool lab's model; the engines
stay up. Every other process is killed by SIGKILL at the fail points of docs/reliability.md and at
random instants, and started again. With `--workers`, so many processes are the endpoint, and each
of them is killed. Half of the kills are on SQLite, half on PostgreSQL. A SIGINT, and the end of
`--minutes`, stop the killing: what was reached is checked and reported all the same.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from examples.tool_lab.run_lab import LAB_VALUES, MODEL
from opd.processes.roles.proxy_workers import Worker, open_workers
from opd.processes.run import Run
from opd.run.config import RunConfig, merge
from opd.run.defaults import resolve, single_machine
from records.lessons.names import LessonState
from records.store import Store
from tests.records.conftest import new_database
from tests.reliability.client_log import ClientLog
from tests.reliability.crash_findings import drained, find
from tests.reliability.crash_tables import (
    KINDS,
    CrashRun,
    findings_table,
    point_table,
    table,
)
from tests.reliability.forked import ForkServer
from tests.reliability.kill_plan import FAIL_POINTS, POINTS_WITH_LESSONS, KillPlan
from tests.reliability.load import Agents, lock_now_and_then
from tests.reliability.victims import Victim

BATCH = 2
PATIENCE_S = 60.0
"""How long a life may take to come to the place where it is to end."""
DRAIN_S = 900.0
FIRST_LESSON_S = 900.0
READY = LessonState.READY

Tell = Callable[[KillPlan], None]


def configuration(
    folder: Path, database_url: str | None, *, rehearses: bool = False, workers: int = 1
) -> RunConfig:
    """The lab on one machine, with small batches and short claims."""
    values = merge(single_machine(str(MODEL), folder), LAB_VALUES)
    loop = {"pause_max_s": 1.0, "claim_ttl_s": 5.0}
    small: dict[str, Any] = {
        "proxy": {
            "port": 0,
            "record_timeout_s": 3.0,
            "spill_retry_s": 0.5,
            "workers": workers,
        },
        # One vote: what is tested is what becomes of turns, and two cores have to keep up.
        "judge": {"loop": loop, "votes": 1},
        "scoring": {"loop": loop},
        "trainer": {
            "rollout_batch_size": BATCH,
            "max_staleness": 1000,
            "tensorboard": False,
            # A policy that learned what the judge asks for would give the trainer nothing to do.
            "learning_rate": 1e-9,
        },
    }
    if rehearses:
        small["rehearsal"] = {
            "enabled": True,
            "loop": loop,
            # Little is measured and much is made.
            "prompt_samples": 4,
            "start_samples": 4,
            "obedience_samples": 2,
            "gap_samples": 2,
            "keep_samples": 2,
            "max_steps": 10_000,
            # Two answers say nothing, and a stop would leave turns behind.
            "obedience_floor": 0.01,
            "states_every_s": 2.0,
            "max_new_tokens": 64,
        }
        small["trainer"] |= {"rollout_batch_size": 4 * BATCH, "hint_wait_s": 30.0}
    if database_url is not None:
        small["store"] = {"url": database_url, "spill_folder": folder / "spill"}
    return resolve(merge(values, small), None, [])


async def crash(
    folder: Path,
    database_url: str | None,
    plan: KillPlan,
    seed: int,
    tell: Tell,
    enough: asyncio.Event | None = None,
    *,
    rehearses: bool = False,
    workers: int = 1,
) -> CrashRun:
    """Kill as planned or until there is `enough`, let the run end in order, look. One that
    rehearses is left alone until the first lesson is ready. `workers` processes are the endpoint.

    Raises EndedByItself.
    """
    started = time.monotonic()
    config = configuration(folder, database_url, rehearses=rehearses, workers=workers)
    log = ClientLog(folder / "acknowledged.log")
    base_url = f"http://{config.proxy.host}:{config.proxy.port}"
    endpoint: list[Worker | None] = [None]
    if workers > 1:
        endpoint = [*open_workers(config.proxy)[1]]
    async with (
        ForkServer(_files(endpoint)) as server,
        Run(config, folder) as run,
        await Store.open(config.store) as store,
    ):
        await run.start_engines()
        agents = Agents(f"{base_url}/v1", config.proxy.model_name, log, seed)
        victims = [
            Victim(
                name,
                folder / "config.toml",
                server=server,
                store=store,
                log=log,
                rng=random.Random(f"{seed} {name} {worker}"),
                worker=worker,
            )
            for name in FAIL_POINTS
            for worker in (endpoint if name == "proxy" else [None])
        ]
        try:
            killer = Killer(plan=plan, enough=enough or asyncio.Event(), tell=tell)
            await _kill_under_load(config, store, agents, victims, killer, seed)
            await drained(store, config, DRAIN_S)
            for victim in victims:
                victim.check_alive()
                await victim.stop()
        finally:
            for victim in victims:
                victim.end_now()
            for file in _files(endpoint):
                os.close(file)
        findings = await find(store, config, folder, log)
    log.close()
    return CrashRun(
        database="SQLite" if database_url is None else "PostgreSQL",
        plan=plan,
        findings=findings,
        seconds=time.monotonic() - started,
    )


def _files(endpoint: Sequence[Worker | None]) -> list[int]:
    """What workers inherit."""
    return [] if endpoint[0] is None else [endpoint[0].memory, *endpoint[0].sockets]


async def _kill_under_load(
    config: RunConfig,
    store: Store,
    agents: Agents,
    victims: list[Victim],
    killer: Killer,
    seed: int,
) -> None:
    """As planned; afterwards all processes live, and the agents have ended."""
    async with asyncio.TaskGroup() as group:
        talking = group.create_task(agents.run(store))
        if config.rehearsal.enabled:
            await _until_lessons(store, victims)
        locking = group.create_task(lock_now_and_then(config.store, random.Random(seed)))
        async with asyncio.TaskGroup() as killing:
            for victim in victims:
                killing.create_task(killer.kill_again_and_again(victim))
        locking.cancel()
        agents.stop()
        await talking


async def _until_lessons(store: Store, victims: list[Victim]) -> None:
    """Examining a first hint takes longer than the lives that follow."""
    for victim in victims:
        await victim.start()
    async with asyncio.timeout(FIRST_LESSON_S):
        while not any(state is READY for _, state in await store.lesson_counts()):
            for victim in victims:
                victim.check_alive()
            await asyncio.sleep(0.5)
    for victim in victims:
        await victim.stop()


@dataclass(frozen=True, slots=True, kw_only=True)
class Killer:
    """Kills victims as planned, until there is `enough`; says each kill."""

    plan: KillPlan
    enough: asyncio.Event
    tell: Tell

    async def kill_again_and_again(self, victim: Victim) -> None:
        """Until its share of the plan is done; then it lives on."""
        while not (self.enough.is_set() or self.plan.is_done(victim.name)):
            dies_at = self.plan.next(victim.name)
            await victim.start(dies_at)
            kill = await victim.killed(dies_at, PATIENCE_S, self.enough)
            if kill is not None:
                self.plan.kills.append(kill)
                self.tell(self.plan)
        await victim.live_on()


async def _until_stopped(
    folder: Path,
    url: str | None,
    plan: KillPlan,
    seed: int,
    tell: Tell,
    seconds: float | None,
    *,
    rehearses: bool,
    workers: int,
) -> CrashRun:
    """As `crash`; a first SIGINT or SIGTERM, and the end of the time, stop the killing only."""
    enough = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop(number: signal.Signals) -> None:
        loop.remove_signal_handler(number)  # the second one ends the test at once
        enough.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    if seconds is not None:
        loop.call_later(seconds, enough.set)
    return await crash(folder, url, plan, seed, tell, enough, rehearses=rehearses, workers=workers)


class Shown:
    """The progress of one run: a bar in a terminal, else a line for each kill."""

    def __init__(self, console: Console, progress: Progress, database: str, plan: KillPlan):
        self._console, self._progress, self._database = console, progress, database
        self._task = progress.add_task(database, total=plan.progress()[1])
        self._started = time.monotonic()

    def tell(self, plan: KillPlan) -> None:
        """There was a kill."""
        last, (done, wanted) = plan.kills[-1], plan.progress()
        text = f"{last.process} at {last.point or 'a random instant'}"
        self._progress.update(self._task, completed=done, description=text)
        if self._console.is_terminal:
            return
        seconds = time.monotonic() - self._started
        left = f"about {seconds * (wanted - done) / done:.0f} s left" if done else "no estimate yet"
        self._console.print(
            f"{self._database} {done}/{wanted} after {seconds:.0f} s, {left}: {text}"
            f"{'' if last.counted else ', idle'}",
            soft_wrap=True,
            highlight=False,
        )


def run_all(options: argparse.Namespace, databases: list[str]) -> bool:
    """The whole crash test, with its progress and its tables; False if something was found, or
    less was done than planned.
    """
    console = Console()
    runs: list[CrashRun] = []
    ends = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    for number, name in enumerate(databases):
        kills, hits = (-(-count // len(databases)) for count in (options.kills, options.hits))
        points = POINTS_WITH_LESSONS if options.rehearse else FAIL_POINTS
        plan = KillPlan.shared(kills, hits, random.Random(f"{options.seed} {name}"), points)
        seconds = None
        if ends is not None:
            seconds = max(ends - time.monotonic(), 0.0) / (len(databases) - number)
        with ExitStack() as stack:
            progress = Progress(*columns, TimeRemainingColumn(), console=console)
            shown = Shown(console, stack.enter_context(progress), name, plan)
            temporary = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            folder = (options.keep or temporary) / name
            folder.mkdir(parents=True)
            url = stack.enter_context(new_database()) if name == "postgresql" else None
            run = _until_stopped(
                folder,
                url,
                plan,
                options.seed,
                shown.tell,
                seconds,
                rehearses=options.rehearse,
                workers=options.workers,
            )
            runs.append(asyncio.run(run))
        if not runs[-1].is_whole and seconds is None:
            break  # it was told to stop
    return report(console, runs)


def report(console: Console, runs: list[CrashRun]) -> bool:
    """Print what was done and found; False as in `run_all`."""
    for shown in (table(runs), point_table(runs), findings_table(runs)):
        console.print(shown)
    for run in runs:
        for kind in KINDS:
            for line in getattr(run.findings, kind):
                console.print(f"{run.database}, {kind}: {line}", markup=False)
        if not run.is_whole:
            console.print(f"{run.database}: stopped before all was done that was planned")
    return all(run.findings.are_none and run.is_whole for run in runs)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Kill the processes of a run; nothing is lost.")
    parser.add_argument("--kills", type=int, default=500, help="kills that count, of all processes")
    parser.add_argument("--hits", type=int, default=5, help="kills at each fail point, at least")
    parser.add_argument("--minutes", type=float, help="stop killing after so long, all in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--database", choices=["sqlite", "postgresql"], help="only this one")
    parser.add_argument("--rehearse", action="store_true", help="practise hints, as serve does")
    parser.add_argument("--workers", type=int, default=1, help="processes of the endpoint")
    parser.add_argument("--keep", type=Path, help="keep the run folders here")
    options = parser.parse_args()
    databases = [options.database] if options.database else ["sqlite", "postgresql"]
    try:
        is_well = run_all(options, databases)
    except KeyboardInterrupt:
        sys.exit("stopped")
    sys.exit(0 if is_well else 1)


if __name__ == "__main__":
    main()
