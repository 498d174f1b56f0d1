"""Cost and benefit of each `trainer.schedule`: the tool lab with each of them, at equal updates.

    python -m benchmarks.schedules [--updates 18] [--steps-off 1 2] [--seeds 0] [--pause-s 0.2]

Agents take `--pause-s` seconds between two turns, for thinking and tools. For each schedule and
seed it prints the time until the updates were done, the staleness of trained samples, the turns
that went stale, for how long generation was held, and success on names that never trained. A run
that did not reach its updates within `--max-seconds` is marked. Every run is the lab's own command;
results are in OUT/SCHEDULE-SEED, a picture in OUT/schedules.svg. `--set` and `--lab=WORD`
(repeatable) are passed to each run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from opd.report.curves import metric_rows

HEADINGS = ("schedule", "seed", "updates", "seconds", "per update")
HEADINGS += ("staleness mean", "max", "stale turns", "held s", "success before", "after")


def main() -> None:
    """Run what is missing and print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=18)
    parser.add_argument("--steps-off", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--pause-s", type=float, default=0.2)
    parser.add_argument("--samples", type=int, default=512, help="answers measured for each skill")
    parser.add_argument("--max-seconds", type=float, default=1800.0)
    parser.add_argument("--out", type=Path, default=Path("runs/schedules"))
    parser.add_argument(
        "--lab", action="append", default=[], help="--lab=WORD of the lab's command"
    )
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    given = parser.parse_args()
    rows: list[tuple[str, ...]] = [HEADINGS]
    for seed in given.seeds:
        for name, words in schedules(given.steps_off).items():
            folder = given.out / f"{name}-{seed}"
            if not (folder / "summary.json").exists():
                run_lab(folder, seed, words, given)
            rows.append(row_of(name, seed, folder))
            print("  ".join(rows[-1]), flush=True)
    print()
    print(table(rows))
    draw(rows[1:], given.out / "schedules.svg")


def schedules(steps_off: Sequence[int]) -> dict[str, list[str]]:
    """Name -> words of the lab's command."""
    ahead = {
        f"step_off_{steps}": ["--schedule", "step_off", "--set", f"trainer.steps_off={steps}"]
        for steps in steps_off
    }
    return {"sync": ["--schedule", "sync"], **ahead, "async": ["--schedule", "async"]}


def run_lab(folder: Path, seed: int, words: Sequence[str], given: argparse.Namespace) -> None:
    """One run of the lab, as a process of its own."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "examples.tool_lab", "--run", str(folder)]
    command += ["--seed", str(seed), "--updates", str(given.updates)]
    command += ["--pause-s", str(given.pause_s), "--eval-samples", str(given.samples)]
    command += ["--max-seconds", str(given.max_seconds), *words, *given.lab]
    for override in given.overrides:
        command += ["--set", override]
    subprocess.run(command, check=True)


def row_of(name: str, seed: int, folder: Path) -> tuple[str, ...]:
    """A run's row; what was not measured is a dash."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    steps = [row for row in metric_rows(folder) if row.get("skipped") is None]
    means = [row["staleness_mean"] for row in steps if row.get("staleness_mean") is not None]
    highest = [row["staleness_max"] for row in steps if row.get("staleness_max") is not None]
    held: dict[str, Any] = summary["learning"]["steps"]["generation_held"] or {"seconds": 0.0}
    seconds, updates = summary["seconds_by_phase"]["learning"], summary["updates"]
    return (
        name,
        str(seed),
        f"{updates}{'' if summary['reached_updates'] else ' (not all)'}",
        f"{seconds:.0f}",
        f"{seconds / updates:.1f}" if updates else "-",
        f"{statistics.fmean(means):.2f}" if means else "-",
        f"{max(highest):.0f}" if highest else "-",
        str(summary["dropped"].get("stale", 0)),
        f"{held['seconds']:.0f}",
        f"{summary['success_before']:.2f}",
        f"{summary['success_after']:.2f}",
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    """The rows in columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def draw(rows: Sequence[Sequence[str]], path: Path) -> None:
    """Time, staleness and success of each run, side by side."""
    names = [f"{row[0]}, seed {row[1]}" for row in rows]
    numbers = {
        heading: [float("nan") if row[place] == "-" else float(row[place]) for row in rows]
        for place, heading in enumerate(HEADINGS)
        if heading not in ("schedule", "seed", "updates")
    }
    figure = Figure(figsize=(13, 0.9 + 0.45 * len(rows)), layout="constrained")
    panels = (
        ("seconds per update", {"": numbers["per update"]}),
        ("staleness of what trained, versions", {"max": numbers["max"]}),
        ("success", {"before": numbers["success before"], "after": numbers["after"]}),
    )
    for axes, (title, series) in zip(figure.subplots(1, 3, sharey=True), panels, strict=True):
        height = 0.8 / len(series)
        for place, (label, values) in enumerate(series.items()):
            ys = [row + place * height for row in range(len(rows))]
            axes.barh(ys, values, height=height * 0.9, align="edge", label=label)
        if title.startswith("staleness"):
            middle = [row + 0.4 for row in range(len(rows))]
            axes.scatter(numbers["staleness mean"], middle, color="black", zorder=3, label="mean")
        if len(series) > 1 or title.startswith("staleness"):
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2, frameon=False)
        axes.set_title(title, loc="left")
        axes.set_yticks([row + 0.4 for row in range(len(rows))], names)
    figure.axes[0].invert_yaxis()
    figure.savefig(path)
    print(f"drawn: {path}")


if __name__ == "__main__":
    main()
