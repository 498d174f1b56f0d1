"""Kills the processes of a run again and again while agents talk; nothing may be lost by it.

    python -m tests.reliability.crash --kills 500

Engines, proxy, judge worker and trainer are real processes with the tool lab's model; the engines
stay up. Every other process is killed by SIGKILL at the fail points of docs/reliability.md and at
random instants, and started again. Half of the kills are on SQLite, half on PostgreSQL.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from examples.tool_lab.run_lab import LAB_VALUES, MODEL
from records.store import Store
from tests.records.conftest import new_database
from tests.reliability.client_log import ClientLog
from tests.reliability.crash_findings import Findings, drained, find
from tests.reliability.kill_plan import FAIL_POINTS, KillPlan
from tests.reliability.load import Agents, lock_now_and_then
from tests.reliability.victims import Victim
from trainer.defaults import resolve, single_machine
from trainer.run import Run
from trainer.run_config import RunConfig, merge

BATCH = 2
PATIENCE_S = 120.0
"""How long a life may take to come to the place where it is to end."""
DRAIN_S = 900.0

Tell = Callable[[KillPlan], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashRun:
    """One run on one database: what was done, and what was found afterwards."""

    database: str
    plan: KillPlan
    findings: Findings
    seconds: float


def configuration(folder: Path, database_url: str | None) -> RunConfig:
    """The lab on one machine, with small batches and short claims."""
    values = merge(single_machine(str(MODEL), folder), LAB_VALUES)
    loop = {"pause_max_s": 1.0, "claim_ttl_s": 5.0}
    small: dict[str, Any] = {
        "proxy": {"port": 0, "record_timeout_s": 3.0, "spill_retry_s": 0.5},
        # One vote: what is tested is what becomes of turns, and two cores have to keep up.
        "judge": {"loop": loop, "votes": 1},
        "scoring": {"loop": loop},
        "trainer": {"rollout_batch_size": BATCH, "max_staleness": 1000, "tensorboard": False},
    }
    if database_url is not None:
        small["store"] = {"url": database_url, "spill_folder": folder / "spill"}
    return resolve(merge(values, small), None, [])


async def crash(
    folder: Path, database_url: str | None, plan: KillPlan, seed: int, tell: Tell
) -> CrashRun:
    """Kill as planned, let the run end in order, look. Raises EndedByItself."""
    started = time.monotonic()
    config = configuration(folder, database_url)
    log = ClientLog(folder / "acknowledged.log")
    base_url = f"http://{config.proxy.host}:{config.proxy.port}"
    async with Run(config, folder), await Store.open(config.store) as store:
        agents = Agents(f"{base_url}/v1", config.proxy.model_name, log, seed)
        victims = [
            Victim(name, folder / "config.toml", store, log, random.Random(f"{seed} {name}"))
            for name in FAIL_POINTS
        ]
        try:
            await _kill_under_load(config, store, agents, victims, plan, seed, tell)
            await drained(store, config, DRAIN_S)
            for victim in victims:
                victim.check_alive()
                await victim.stop()
        finally:
            for victim in victims:
                victim.end_now()
        findings = await find(store, config, folder, log)
    log.close()
    return CrashRun(
        database="SQLite" if database_url is None else "PostgreSQL",
        plan=plan,
        findings=findings,
        seconds=time.monotonic() - started,
    )


async def _kill_under_load(
    config: RunConfig,
    store: Store,
    agents: Agents,
    victims: list[Victim],
    plan: KillPlan,
    seed: int,
    tell: Tell,
) -> None:
    """As planned; afterwards all processes live, and the agents have ended."""
    async with asyncio.TaskGroup() as group:
        talking = group.create_task(agents.run(store))
        locking = group.create_task(lock_now_and_then(config.store, random.Random(seed)))
        async with asyncio.TaskGroup() as killing:
            for victim in victims:
                killing.create_task(_kill_again_and_again(victim, plan, tell))
        locking.cancel()
        agents.stop()
        await talking


async def _kill_again_and_again(victim: Victim, plan: KillPlan, tell: Tell) -> None:
    while not plan.is_done(victim.name):
        dies_at = plan.next(victim.name)
        await victim.start(dies_at)
        plan.kills.append(await victim.killed(dies_at, PATIENCE_S))
        tell(plan)
    await victim.start()


def table(runs: list[CrashRun]) -> Table:
    """What was done and found, for the terminal and the documentation."""
    shown = Table("database", "process", "kills", "counted", "at fail points", "at random instants")
    for run in runs:
        for process in FAIL_POINTS:
            kills = [kill for kill in run.plan.kills if kill.process == process]
            at_points = sum(kill.point is not None for kill in kills)
            counts = (len(kills), run.plan.counted(process), at_points, len(kills) - at_points)
            shown.add_row(run.database, process, *map(str, counts))
    return shown


def point_table(runs: list[CrashRun]) -> Table:
    """How often each fail point was hit."""
    shown = Table("process", "fail point", *(run.database for run in runs))
    for process, points in FAIL_POINTS.items():
        for point in points:
            hits = [str(run.plan.hits()[f"{process} {point}"]) for run in runs]
            shown.add_row(process, point, *hits)
    return shown


def findings_table(runs: list[CrashRun]) -> Table:
    """What must be zero, and what there was to lose."""
    shown = Table("", *(run.database for run in runs))
    for name in ("num_acknowledged", "num_trained", "num_versions"):
        shown.add_row(name, *(str(getattr(run.findings, name)) for run in runs))
    for name in ("lost", "trained_twice", "misjudged", "stuck", "unverified"):
        shown.add_row(name, *(str(len(getattr(run.findings, name))) for run in runs))
    shown.add_row("minutes", *(f"{run.seconds / 60:.0f}" for run in runs))
    return shown


def _plans(kills: int, hits: int, seed: int, databases: list[str]) -> dict[str, KillPlan]:
    each = -(-kills // (len(databases) * len(FAIL_POINTS)))
    hits_each = -(-hits // len(databases))
    return {name: KillPlan(each, hits_each, random.Random(f"{seed} {name}")) for name in databases}


def run_all(kills: int, hits: int, seed: int, databases: list[str], keep: Path | None) -> bool:
    """The whole crash test, with its progress and its tables; False if something was found."""
    console = Console()
    runs: list[CrashRun] = []
    plans = _plans(kills, hits, seed, databases)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    for name, plan in plans.items():
        with ExitStack() as stack:
            progress = stack.enter_context(
                Progress(*columns, TimeRemainingColumn(), console=console)
            )
            task = progress.add_task(name, total=plan.progress()[1])

            def tell(plan: KillPlan, progress: Progress = progress, task: Any = task) -> None:
                last, (done, wanted) = plan.kills[-1], plan.progress()
                text = f"{last.process} at {last.point or 'a random instant'}"
                progress.update(task, completed=done, description=text)
                if not console.is_terminal:
                    console.print(f"{done}/{wanted} {text}{'' if last.counted else ', idle'}")

            temporary = stack.enter_context(tempfile.TemporaryDirectory())
            folder = (keep if keep is not None else Path(temporary)) / name
            folder.mkdir(parents=True)
            url = stack.enter_context(new_database()) if name == "postgresql" else None
            runs.append(asyncio.run(crash(folder, url, plan, seed, tell)))
    for shown in (table(runs), point_table(runs), findings_table(runs)):
        console.print(shown)
    for run in runs:
        for kind in ("lost", "trained_twice", "misjudged", "stuck", "unverified"):
            for line in getattr(run.findings, kind):
                console.print(f"{run.database}, {kind}: {line}", markup=False)
    return all(run.findings.are_none for run in runs)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Kill the processes of a run; nothing is lost.")
    parser.add_argument("--kills", type=int, default=500, help="kills that count, of all processes")
    parser.add_argument("--hits", type=int, default=5, help="kills at each fail point, at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--database", choices=["sqlite", "postgresql"], help="only this one")
    parser.add_argument("--keep", type=Path, help="keep the run folders here")
    options = parser.parse_args()
    databases = [options.database] if options.database else ["sqlite", "postgresql"]
    try:
        is_well = run_all(options.kills, options.hits, options.seed, databases, options.keep)
    except KeyboardInterrupt:
        sys.exit("stopped")
    sys.exit(0 if is_well else 1)


if __name__ == "__main__":
    main()
