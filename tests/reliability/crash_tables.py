"""What the crash test did and found, as tables for the terminal and the documentation."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from tests.reliability.crash_findings import Findings
from tests.reliability.kill_plan import FAIL_POINTS, KillPlan

KINDS = ("lost", "trained_twice", "misjudged", "stuck", "unverified")
"""Of findings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashRun:
    """One run on one database: what was done, and what was found afterwards."""

    database: str
    plan: KillPlan
    findings: Findings
    seconds: float

    @property
    def is_whole(self) -> bool:
        """Whether all was done that was planned."""
        return all(self.plan.is_done(process) for process in FAIL_POINTS)


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
    places = runs[0].plan.points if runs else FAIL_POINTS
    for process, points in places.items():
        for point in points:
            hits = [str(run.plan.hits()[f"{process} {point}"]) for run in runs]
            shown.add_row(process, point, *hits)
    return shown


def findings_table(runs: list[CrashRun]) -> Table:
    """What must be zero, and what there was to lose."""
    shown = Table("", *(run.database for run in runs))
    for name in ("num_acknowledged", "num_trained", "num_lessons", "num_versions"):
        shown.add_row(name, *(str(getattr(run.findings, name)) for run in runs))
    for name in KINDS:
        shown.add_row(name, *(str(len(getattr(run.findings, name))) for run in runs))
    shown.add_row("minutes", *(f"{run.seconds / 60:.0f}" for run in runs))
    return shown
