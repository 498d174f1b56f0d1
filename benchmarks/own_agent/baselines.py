"""Other ways to learn from the objections that a measured run has recorded.

    python -m benchmarks.own_agent.baselines --run runs/own_agent/runs/CELL [--methods sft binary]

For each run folder of a measured cell, and each method (offline.py): the policy trains offline from
the run's start model on what the run recorded, with the same steps and samples per step. It is then
served without rehearsal and measured like the cell. Results are next to the cell's, in
CELL.baseline-METHOD.json; existing ones are not measured again. They are rows of the benchmark's
table. The agent that keeps hints in its prompt is `python -m benchmarks.own_agent --remember`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.own_agent.cell import as_counts, free_folder, say, shown_rates, write_whole
from benchmarks.own_agent.measure import Rates, measure
from benchmarks.own_agent.offline import METHODS, Method, trained
from benchmarks.own_agent.protocol import LATER
from benchmarks.own_agent.recorded import Recorded, recorded
from benchmarks.own_agent.serving import MODEL, ROOT, serving
from benchmarks.own_agent.table import table
from trainer.checkpoints.checkpoint import copy_tokenizer
from trainer.publishing.merged import save_full

UNTRAINED = ("rehearsal.enabled=false", "trainer.rollout_batch_size=4096")
"""For `opd serve`: no batch is ever full."""


def cell_of(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The file and results of the cell that a run folder belongs to. Raises SystemExit."""
    out = folder.resolve().parents[1]
    for path in sorted(out.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if result.get("run") == folder.name and "baseline" not in result:
            return path, result
    raise SystemExit(f"{folder}: {out} has no results of this run; it must be measured first")


def as_result(
    cell: Mapping[str, Any], method: Method, data: Recorded, end: Rates, seconds: float
) -> dict[str, Any]:
    """A row's numbers: the cell's, with the method's results in place of the run's."""
    kept = ("start", "kinds", "seed", "asked_objections", "protocol", "quiet", "objecting", "run")
    store = {"version": len(data.steps), "accepted": len(data.objected), "drops": {}}
    return {
        **{key: cell[key] for key in kept},
        "digest": f"{cell['digest']}-{method}",
        "baseline": method,
        "end": as_counts(end),
        "looks": [],
        "hints": [],
        "waited": {"seconds": round(seconds, 1), "ended": "trained offline", "hints": {}},
        "store": store | {"lessons": {"all trained": sum(data.steps)}, "lesson_drops": {}},
    }


async def measured(folder: Path, methods: list[Method]) -> list[dict[str, Any]]:
    """The results of all methods on what a run has recorded."""
    path, cell = cell_of(folder)
    data = await recorded(folder)
    say(
        f"{folder.name}: {len(data.steps)} steps of {sum(data.steps)} samples; {len(data.hinted)} "
        f"states, {len(data.objected)} answers objected to, {len(data.accepted)} accepted"
    )
    results = []
    for method in methods:
        file = path.with_name(f"{path.stem}.baseline-{method}.json")
        if not file.exists():
            write_whole(file, await _result(folder, cell, data, method))
        results.append(json.loads(file.read_text(encoding="utf-8")))
    return results


async def _result(
    folder: Path, cell: Mapping[str, Any], data: Recorded, method: Method
) -> dict[str, Any]:
    clock = time.monotonic()
    start = str(ROOT / MODEL)
    policy, steps = await asyncio.to_thread(
        trained, method, data, start, cell["kinds"], cell["seed"]
    )
    seconds = time.monotonic() - clock
    for line in steps:
        say(f"{method}, {line}")
    turned = (LATER | cell["protocol"])["change_of_mind"]
    with tempfile.TemporaryDirectory() as weights:
        save_full(policy, Path(weights))
        copy_tokenizer(start, Path(weights))
        run = free_folder(folder.with_name(f"{folder.name}.baseline-{method}"))
        async with serving(run, UNTRAINED, model=Path(weights)) as served:
            end = await measure(
                served.endpoint, cell["kinds"], cell["protocol"]["n"], cell["seed"], turned=turned
            )
    say(f"{method}: {shown_rates(end)}")
    return as_result(cell, method, data, end, seconds)


def main() -> None:
    """Measure what is missing, print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.own_agent.baselines",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--run", nargs="+", type=Path, required=True, metavar="RUN_FOLDER")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    arguments = parser.parse_args()
    results = []
    for folder in arguments.run:
        _, cell = cell_of(folder)
        results += [cell, *asyncio.run(measured(folder, arguments.methods))]
    print("\n" + table(results))


if __name__ == "__main__":
    main()
