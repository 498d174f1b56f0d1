"""The benchmarks that fit into a quarter of an hour, one after another.

    ./run.sh bench [--quick] [--only NAME ...] [--out FOLDER] [--append docs/benchmarks.md]

Each runs in a process of its own. What they print goes to the terminal and to OUT/report.md, with
the date, the commit, the machine and the versions; what a turn and a token cost is drawn in
OUT/costs.svg. `--append` adds the report to a page. `--quick` takes three minutes: it tells whether
everything still works and in which order of magnitude, not more. Benchmarks that take longer are in
docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TypeAlias

from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "transformers", "aiohttp", "fastapi", "sqlalchemy")
OUT = "{out}"
"""In arguments: the folder of the results."""
DRAWN = ("record a turn", "page: Now", "page: Sessions", "page: a turn")
Series: TypeAlias = dict[str, tuple[list[float], list[float]]]
"""Label -> where on the axis, and what was measured there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A module of this package, its arguments, and about how many minutes it takes on two cores.
    Without `quick` it is left out of a quick run.
    """

    name: str
    full: str
    minutes: float
    quick: str | None = None
    quick_minutes: float = 0.0


SUITE = (
    Benchmark(
        name="against_litellm",
        full="--rounds 3 --listen-s 8",
        minutes=3.5,
        quick="--rounds 1 --conversations 20 --streams 8 --listen-s 4",
        quick_minutes=1.1,
    ),
    Benchmark(
        name="proxy_latency",
        full="--seconds 40",
        minutes=1.0,
        quick="--seconds 10",
        quick_minutes=0.4,
    ),
    Benchmark(
        name="history_cost",
        full=f"--turns 8 --out {OUT}/history.json",
        minutes=0.6,
        quick=f"--turns 2 --lengths 1000,8000 --out {OUT}/history.json",
        quick_minutes=0.3,
    ),
    Benchmark(
        name="stream_cost",
        full=f"--out {OUT}/streams.json",
        minutes=3.5,
        quick=f"--lengths 500,2000 --out {OUT}/streams.json",
        quick_minutes=0.6,
    ),
    Benchmark(name="tenant_fairness", full="--seconds 15", minutes=0.7),
    Benchmark(name="store_writes", full="--seconds 20 --slice 5 --processes 2", minutes=0.9),
    Benchmark(
        name="store_scale",
        full=f"--turns 1000 32000 --out {OUT}/store.json",
        minutes=1.5,
        quick=f"--turns 1000 4000 --only record page --out {OUT}/store.json",
        quick_minutes=0.4,
    ),
    Benchmark(
        name="engine_throughput",
        full="--rounds 3",
        minutes=1.2,
        quick="--rounds 1 --requests 4",
        quick_minutes=0.3,
    ),
    Benchmark(name="shared_prefix", full="--rounds 3", minutes=0.4),
    Benchmark(name="objective_cost", full="", minutes=0.4, quick="--steps 4", quick_minutes=0.2),
    Benchmark(name="logprob_memory", full="--tokens 1024 --vocab 49152 --hidden 576", minutes=0.8),
)


def main() -> None:
    """Run them; the exit status is 1 if one failed."""
    parser = argparse.ArgumentParser(
        prog="./run.sh bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="three minutes instead of fifteen")
    parser.add_argument("--only", nargs="+", choices=[one.name for one in SUITE], default=[])
    parser.add_argument("--out", type=Path, help="default: runs/bench/DATE-TIME")
    parser.add_argument("--append", type=Path, help="add the report to this page")
    given = parser.parse_args()
    out = given.out or ROOT / "runs" / "bench" / time.strftime("%Y-%m-%d-%H%M%S")
    out.mkdir(parents=True, exist_ok=True)
    chosen = [one for one in SUITE if one.name in given.only or not given.only]
    if given.quick:
        chosen = [one for one in chosen if one.quick is not None]
    sections, failed = [], []
    for place, one in enumerate(chosen):
        left = sum(minutes(later, given.quick) for later in chosen[place:])
        number = f"{place + 1} of {len(chosen)}"
        print(f"\n== {number}: {one.name}; about {left:.0f} min left", flush=True)
        arguments = (one.quick or "") if given.quick else one.full
        status, printed = run(one.name, arguments.replace(OUT, str(out)).split())
        if status:
            failed.append(one.name)
            printed += f"\nended with status {status}"
        shown = arguments.replace(f"--out {OUT}/", "--out ")
        sections.append(f"### {one.name}\n\n`{one.name} {shown}`\n\n```\n{printed.strip()}\n```\n")
    drawn = draw(out)
    report = "\n".join([heading(given.quick), *sections])
    (out / "report.md").write_text(report, encoding="utf-8")
    if given.append is not None:
        with given.append.open("a", encoding="utf-8") as page:
            page.write(f"\n{report}")
    print(f"\nreport: {out / 'report.md'}" + (f"\ndrawn: {drawn}" if drawn else ""))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def minutes(one: Benchmark, is_quick: bool) -> float:
    """About how long it takes."""
    return one.quick_minutes if is_quick else one.minutes


def run(name: str, arguments: Sequence[str]) -> tuple[int, str]:
    """Run one; its exit status and what it printed, which is shown as it comes."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    lines = []
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=None, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return process.returncode, "".join(lines)


def heading(is_quick: bool) -> str:
    """Date, commit, machine and versions."""
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return (
        f"## {time.strftime('%Y-%m-%d')}{' (quick)' if is_quick else ''}\n\n"
        f"Commit {commit()}; {processor()}, {os.cpu_count()} cores; "
        f"Python {platform.python_version()}, {packages}.\n"
    )


def commit() -> str:
    """The commit that is measured, or that there is none."""
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return found.stdout.strip() or "unknown (no git repository)"


def processor() -> str:
    """Its model, as far as the system tells."""
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    names = [line.partition(": ")[2] for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def draw(out: Path) -> Path | None:
    """Cost against history, length of the reply and size of the store, as far as it was measured;
    None if nothing was.
    """
    panels = [
        ("a turn, ms of processor time", "tokens of its history", _lines(out, "history")),
        ("a streamed token, us of processor time", "tokens of the reply", _lines(out, "streams")),
        ("the store, ms", "turns in it", _store_lines(out)),
    ]
    panels = [one for one in panels if one[-1]]
    if not panels:
        return None
    figure = Figure(figsize=(4.6 * len(panels), 3.6), layout="constrained")
    for axes, (title, xlabel, series) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        for label, (xs, ys) in series.items():
            axes.plot(xs, ys, marker="o", label=label)
        axes.set_xscale("log")
        places = sorted({x for xs, _ in series.values() for x in xs})
        axes.set_xticks(places, [f"{x:,.0f}" for x in places])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_title(title, loc="left")
        axes.set_xlabel(xlabel)
        axes.legend(frameon=False)
    path = out / "costs.svg"
    figure.savefig(path, metadata={"Date": None})
    return path


def _lines(out: Path, name: str) -> Series:
    """What `history_cost` or `stream_cost` wrote."""
    path = out / f"{name}.json"
    if not path.is_file():
        return {}
    found = json.loads(path.read_text())
    lengths = found.pop("lengths")
    return {label: (lengths, values) for label, values in found.items()}


def _store_lines(out: Path) -> Series:
    path = out / "store.json"
    if not path.is_file():
        return {}
    found = json.loads(path.read_text())
    sizes = [float(size) for size in found]
    return {
        name: (sizes, [found[size][name] for size in found])
        for name in DRAWN
        if all(name in figures for figures in found.values())
    }


if __name__ == "__main__":
    main()
