"""The objectives side by side on the tool lab, with three preferences at once: temperature unit,
hotel order, and a title for the user, which the base uses about 2% of the time.

    python -m benchmarks.objectives --settings tail8 k1 --seeds 0 1 2 --updates 25

Every run is the lab's own command with its recipe, except for the objective and what it needs from
teacher and judge. Afterwards the kept versions of the weights are evaluated on held-out names, one
after another, until all preferences reach 0.8 (after how many updates and seconds of learning?).
The last one is also evaluated on the other skills and a contrary instruction in the prompt, as
ratios to before. A finished run is not repeated: results are in OUT/SETTING-SEED/objectives.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from examples.tool_lab.evaluate import OTHER_SKILLS, evaluate
from examples.tool_lab.local_generate import LocalGenerator
from examples.tool_lab.preferences import TRAINABLE_KINDS
from examples.tool_lab.run_lab import MODEL

TARGET = 0.8
IN_TRAINER = ["trainer.teacher.kind=frozen", "scoring.engine_scores=false", "scoring.top_k=0"]
ONE_SCORE = ["scoring.top_k=0"]


def _objective(name: str, *options: str) -> list[str]:
    return [f"trainer.objective.name={name}", *(f"trainer.objective.{one}" for one in options)]


SETTINGS: dict[str, list[str]] = {
    "k1": [*_objective("hindsight_opd"), *ONE_SCORE],
    "cispo": [
        *_objective("hindsight_opd", "surrogate=cispo", "clip_low=1.0", "clip_high=4.0"),
        *ONE_SCORE,
    ],
    "gspo": [*_objective("hindsight_opd", "surrogate=gspo"), *ONE_SCORE],
    "gspo-sequence": [*_objective("hindsight_opd", "surrogate=gspo_sequence"), *ONE_SCORE],
    "pure-is": [
        *_objective("hindsight_opd", "surrogate=pure_is"),
        *ONE_SCORE,
        "trainer.correction.preset=pure_is",
    ],
    "decoupled": [
        *_objective("hindsight_opd", "surrogate=decoupled"),
        *ONE_SCORE,
        "trainer.correction.importance_level=none",
    ],
    "a3po": [
        *_objective("hindsight_opd", "surrogate=a3po"),
        *ONE_SCORE,
        "trainer.correction.importance_level=none",
    ],
    "m2po": [
        *_objective("hindsight_opd", "surrogate=m2po"),
        *ONE_SCORE,
        "trainer.correction.mode=bypass",
    ],
    "opsm": [*_objective("hindsight_opd", "dual_clip=3.0", "opsm_delta=0.01"), *ONE_SCORE],
    "rewards-too": [
        *_objective("hindsight_opd", "reward_coef=0.1", "reward_baseline=step"),
        *ONE_SCORE,
        "judge.reward=verdict",
    ],
    "async": [
        *_objective("hindsight_opd", "surrogate=unclipped", "advantage_reference=current"),
        *ONE_SCORE,
        "trainer.correction.mode=bypass",
    ],
    "supervised-k2": [*_objective("supervised_opd", "estimator=k2"), *ONE_SCORE],
    "supervised-k3": [*_objective("supervised_opd", "estimator=k3"), *ONE_SCORE],
    "supervised-abs": [*_objective("supervised_opd", "estimator=abs"), *ONE_SCORE],
    "supervised-k1+": [*_objective("supervised_opd", "estimator=k1+"), *ONE_SCORE],
    "forward8": [*_objective("forward_kl_topk", "topk=8"), *IN_TRAINER],
    "forward8-engine": [*_objective("forward_kl_topk", "topk=8"), "scoring.top_k=8"],
    "tail8": [*_objective("topk_tail_reverse_kl", "topk=8"), "scoring.top_k=8"],
    "tail8-trainer": [*_objective("topk_tail_reverse_kl", "topk=8"), *IN_TRAINER],
    "jsd16": [*_objective("self_distillation", "topk=16"), *IN_TRAINER],
    "jsd16-teacher": [
        *_objective("self_distillation", "topk=16", "support_of=teacher"),
        *IN_TRAINER,
    ],
    "overlap4": [
        *_objective("overlap_topk"),
        *IN_TRAINER,
        "judge.selection=shortest_first",
    ],
    "side16": [*_objective("side_samples", "samples=16"), *IN_TRAINER],
    "sparse16": [*_objective("sparse_kl", "topk=16"), *IN_TRAINER],
    "sparse16-forward": [
        *_objective("sparse_kl", "topk=16", "direction=forward", "support_of=teacher"),
        *IN_TRAINER,
    ],
    "sparse16-skewed": [*_objective("sparse_kl", "topk=16", "direction=skewed"), *IN_TRAINER],
    "sparse16-policy-gradient": [
        *_objective("sparse_kl", "topk=16", "direction=policy_gradient"),
        *IN_TRAINER,
    ],
}


def main() -> None:
    """Run what is missing and print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--settings", nargs="+", choices=sorted(SETTINGS), default=["tail8", "k1"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--updates", type=int, default=25)
    parser.add_argument(
        "--max-seconds",
        type=float,
        default=7200.0,
        help="time limit for learning: once everything is learned, lessons become rare",
    )
    parser.add_argument("--samples", type=int, default=256, help="answers for each rate at the end")
    parser.add_argument(
        "--every",
        type=int,
        default=128,
        help="answers for each rate of a version; 0: only the last version",
    )
    parser.add_argument("--open-users", type=float, default=0.5, help="like the lab's option")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/objectives"))
    parser.add_argument(
        "--set", action="append", default=[], help="for all runs: section.key=value"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results = []
    for setting in arguments.settings:
        for seed in arguments.seeds:
            folder = arguments.out / f"{setting}-{seed}"
            results.append(run_once(setting, seed, folder, arguments))
            print(_row(results[-1]), file=sys.stderr, flush=True)
    print("\n".join([HEADER, *(_row(result) for result in results)]))


def run_once(
    setting: str, seed: int, folder: Path, arguments: argparse.Namespace
) -> dict[str, Any]:
    """One run of the lab and the evaluation of its versions."""
    done = folder / "objectives.json"
    if done.exists():
        return json.loads(done.read_text())
    folder.parent.mkdir(parents=True, exist_ok=True)
    overrides = ["trainer.keep_checkpoints=1000", *SETTINGS[setting], *arguments.set]
    command = [sys.executable, "-m", "examples.tool_lab", "--seed", str(seed)]
    command += ["--updates", str(arguments.updates), "--eval-samples", "32"]
    command += ["--max-seconds", str(arguments.max_seconds)]
    command += ["--no-rehearsal", "--open-users", str(arguments.open_users)]
    command += ["--preferences", ",".join(TRAINABLE_KINDS), "--run", str(folder)]
    command += [word for one in overrides for word in ("--set", one)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    result = asyncio.run(evaluate_run(folder, seed, arguments.every, arguments.samples))
    result |= {"setting": setting, "seed": seed}
    done.write_text(json.dumps(result, indent=1) + "\n")
    return result


async def evaluate_run(folder: Path, seed: int, every: int, samples: int) -> dict[str, Any]:
    """When the target was reached, and the rates before and after."""
    summary = json.loads((folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["skipped"] is None]
    first = rows[0]["time"] - rows[0]["seconds/step"] - rows[0]["seconds/wait"]
    reached: dict[str, Any] = {"updates": None, "seconds": None}
    curve = []
    for row in steps if every else []:
        weights = folder / "checkpoints" / f"step_{row['version']:06d}"
        worst, by_kind = await _success(str(weights), every, seed)
        curve.append({"update": row["step"], **by_kind})
        if worst >= TARGET:
            reached = {"updates": row["step"], "seconds": round(row["time"] - first, 1)}
            break
    newest = str(folder / "checkpoints" / f"step_{steps[-1]['version']:06d}")
    before = await _rates_before(folder.parent / f"before-{seed}-{samples}.json", samples, seed)
    after = await _rates(newest, samples, seed)
    return {
        "reached": reached,
        "updates": len(steps),
        "success": {kind: after[f"success_{kind}"] for kind in TRAINABLE_KINDS},
        "other_skills_worst": min(after[name] / before[name] for name in OTHER_SKILLS),
        "contrary_worst": min(
            after[name] / before[name] for name in before if name.startswith("contrary")
        ),
        "gap_falls": summary["gap_to_hinted_teacher"]["fall"],
        "learning_seconds": summary["seconds_by_phase"]["learning"],
        "before": before,
        "after": after,
        "curve": curve,
    }


async def _success(weights: str, n: int, seed: int) -> tuple[float, dict[str, float]]:
    rates = await _evaluate(weights, n, seed, ["success"])
    return min(rates.values()), rates


async def _rates_before(kept: Path, samples: int, seed: int) -> dict[str, float]:
    """The rates of the start, which all runs of a seed share."""
    if not kept.exists():
        rates = await _rates(str(MODEL), samples, seed)
        kept.write_text(json.dumps(rates, indent=1) + "\n")
    return json.loads(kept.read_text())


async def _rates(weights: str, n: int, seed: int) -> dict[str, float]:
    return await _evaluate(weights, n, seed, ["success", "other_skills", "contrary"])


async def _evaluate(weights: str, n: int, seed: int, groups: Sequence[str]) -> dict[str, float]:
    torch.manual_seed(seed)
    generator = LocalGenerator.load(weights)
    rates = await evaluate(generator, n, seed, groups, TRAINABLE_KINDS)
    return {name: rate.value for name, rate in rates.items()}


HEADER = (
    f"{'setting':17} seed  reached 0.8 (updates, s)  updates  "
    f"{'unit':>5} {'order':>5} {'title':>5}  other   contrary  gap fell (reverse, forward)"
)


def _row(result: dict[str, Any]) -> str:
    reached, success, gap = result["reached"], result["success"], result["gap_falls"]
    when = "not reached"
    if reached["updates"] is not None:
        when = f"{reached['updates']}, {reached['seconds']:.0f} s"
    return (
        f"{result['setting']:17} {result['seed']:4}  {when:25} {result['updates']:6}  "
        + " ".join(f"{success[kind]:5.2f}" for kind in TRAINABLE_KINDS)
        + f"  {result['other_skills_worst']:5.2f}   {result['contrary_worst']:8.2f}"
        + f"  {gap['reverse_kl']:.0%}, {gap['forward_kl']:.0%}"
    )


if __name__ == "__main__":
    main()
