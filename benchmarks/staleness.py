"""How old samples may be, and what several side samples per position are worth, by objective.

    python -m benchmarks.staleness [--steps 16] [--staleness 0 1 2 4 8] [--seeds 0]

The tool lab's model, in this process: each step trains on turns that the weights of `staleness`
steps before sampled, with the start under a hint as the teacher. After the last step, on names that
never trained: success, and how far the policy still is from the teacher (reverse KL in nats per
token, on the policy's own answers). The reverse KL that trains is estimated from side samples that
the sampling weights drew; its advantage uses the log-probs of the learner (recomputed) or of those
weights (stored). The forward KL is that over the teacher's likeliest tokens. Then the variance of
the gradient over redrawn side samples, against their number m. OUT gets a JSON file and a picture.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.own_agent.cell import say
from examples.tool_lab.cases import hinted_pair
from examples.tool_lab.evaluate import Rate, evaluate
from examples.tool_lab.local_generate import LocalGenerator
from examples.tool_lab.run_lab import MODEL
from records.types import ReadySample, Teaching, VersionSpan
from trainer.batch.collate import score_responses
from trainer.batch.side_sampling import with_side_samples
from trainer.config import TrainerConfig
from trainer.model.policy import Policy
from trainer.step.update import Updater

KIND = "unit"
TOP_K = 8
OBJECTIVES: dict[str, dict[str, Any]] = {
    "reverse KL, recomputed advantage": {"name": "side_samples", "samples": 16},
    "reverse KL, stored advantage": {
        "name": "side_samples", "samples": 16, "advantage_reference": "old",
    },
    "reverse KL, stored advantage, no ratio": {
        "name": "side_samples", "samples": 16, "advantage_reference": "old", "importance": False,
    },
    "forward KL, top-k": {"name": "forward_kl_topk", "topk": TOP_K},
}  # fmt: skip
SAMPLES = (1, 4, 16, 64)


def main() -> None:
    """Measure what is missing in OUT, print two tables, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--batch", type=int, default=24, help="turns of a step")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--n", type=int, default=128, help="answers measured for each point")
    parser.add_argument("--redraws", type=int, default=24, help="gradients for each variance")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/staleness"))
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {"points": {}, "variance": {}}
    for name in OBJECTIVES:
        for staleness in given.staleness:
            for seed in given.seeds:
                key = f"{name}|{staleness}|{seed}"
                if key not in results["points"]:
                    started = time.monotonic()
                    lesson = Lesson(OBJECTIVES[name], given, seed)
                    lesson.learn(staleness)
                    rate, far = lesson.success(), lesson.distance()
                    results["points"][key] = {"hits": rate.hits, "count": rate.count, "kl": far}
                    path.write_text(json.dumps(results, indent=1))
                    took = time.monotonic() - started
                    say(f"{key}: {rate.shown}, {far:.4f} nats from the teacher ({took:.0f} s)")
    if not results["variance"]:
        results["variance"] = variances(given)
        path.write_text(json.dumps(results, indent=1))
    print(table(results, given.staleness))
    draw(results, given.staleness, given.out / "staleness.svg")


class Lesson:
    """A policy that learns one preference from stale turns."""

    def __init__(self, objective: dict[str, Any], given: argparse.Namespace, seed: int) -> None:
        self.given = given
        self.seed = seed
        self.config = TrainerConfig.model_validate(
            {
                "tensorboard": False,
                "beta_kl": 0.0,
                "learning_rate": given.rate,
                "teacher": {"kind": "frozen"},
                "objective": objective,
            }
        )
        torch.manual_seed(seed)
        self.policy, self.sampler, start = (_load(self.config) for _ in range(3))
        self.updater = Updater(self.policy, None, self.config, teacher=start.freeze())
        self.generator = LocalGenerator.load(str(MODEL))
        self.rng = random.Random(f"staleness-{seed}")

    def learn(self, staleness: int) -> None:
        """All steps, on samples that are `staleness` steps old."""
        weights = deque([self._weights()], maxlen=staleness + 1)
        for step in range(self.given.steps):
            gap = len(weights) - 1
            samples = self.with_side_samples(self.turns(weights[0], step - gap, self.given.batch))
            self.updater.update(samples, step, version_gaps=[gap] * len(samples))
            weights.append(self._weights())

    def success(self) -> Rate:
        """How often the policy shows the preference unasked."""
        self.generator.model.load_state_dict(self.policy.model.state_dict())
        torch.manual_seed(1000 + self.seed)
        rates = asyncio.run(
            evaluate(self.generator, self.given.n, 1000 + self.seed, ["success"], [KIND])
        )
        return rates[f"success_{KIND}"]

    def distance(self) -> float:
        """Mean log pi - log q per token of the policy's own answers to new requests, in nats."""
        self.rng = random.Random(f"distance-{self.seed}")
        torch.manual_seed(2000 + self.seed)
        turns = self.turns(self._weights(), 0, self.given.n)
        hinted = [one.teachings[0].hinted_prompt_ids for one in turns]
        responses = [one.response_ids for one in turns]
        teacher = self.updater.teacher
        assert teacher is not None
        scores = score_responses(
            teacher, hinted, responses, max_tokens=4096, device=self.policy.device
        )
        own = np.concatenate([one.rollout_logprobs for one in turns])
        return float(own.mean() - torch.cat([one.logprobs for one in scores]).mean())

    def turns(self, weights: dict[str, Tensor], version: int, number: int) -> list[ReadySample]:
        """Turns that these weights sample, with their log-probs; the sampler then has them."""
        self.sampler.model.load_state_dict(weights)
        self.generator.model.load_state_dict(weights)
        pairs = [hinted_pair(self.rng, KIND) for _ in range(number)]
        rendering = self.generator.rendering
        prompts, hinted = (
            [rendering.prompt_ids(one.messages, one.tools) for one in requests]
            for requests in zip(*pairs, strict=True)
        )
        responses = self.generator.sample_ids(prompts, 1.0)
        scores = score_responses(
            self.sampler, prompts, responses, max_tokens=4096, device=self.sampler.device
        )
        samples = []
        for index, (prompt, under_hint, response) in enumerate(
            zip(prompts, hinted, responses, strict=True)
        ):
            name = f"{version}-{index}-{self.rng.random()}"
            # The teacher is in the trainer: no engine has scored.
            unknown = np.full(len(response), np.nan, dtype=np.float32)
            teaching = Teaching(
                candidate=0, hint="hint", teacher="", teacher_version="",
                hinted_prompt_ids=under_hint, teacher_logprobs=None,
            )  # fmt: skip
            samples.append(
                ReadySample(
                    turn_id=name, session_id=name, prompt_ids=prompt, response_ids=response,
                    rollout_logprobs=scores[index].logprobs.numpy(), teacher_logprobs=unknown,
                    temperature=1.0, distribution_modified=None,
                    version_spans=(VersionSpan(version=version, start=0, end=len(response)),),
                    hint="hint", created_at=0.0, teachings=(teaching,),
                )
            )  # fmt: skip
        return samples

    def with_side_samples(self, samples: Sequence[ReadySample]) -> list[ReadySample]:
        """The same, with new side samples of the sampling weights if the objective has any."""
        plan = self.updater.plan
        if plan.side_source is None:
            return list(samples)
        bare = [replace(one, side_samples=None) for one in samples]
        return with_side_samples(bare, self.sampler, plan, [0] * len(bare), None)

    def _weights(self) -> dict[str, Tensor]:
        return {name: one.clone() for name, one in self.policy.model.state_dict().items()}


def variances(given: argparse.Namespace) -> dict[str, float]:
    """m -> the summed variance of the gradient over redrawn side samples of one batch."""
    found = {}
    for number in SAMPLES:
        lesson = Lesson({"name": "side_samples", "samples": number}, given, seed=0)
        turns = lesson.turns(lesson.policy.model.state_dict(), 0, given.batch)
        gradients = []
        for _ in range(given.redraws):
            lesson.updater.accumulate(
                lesson.updater.preparation.prepare(lesson.with_side_samples(turns))
            )
            parts = [one.grad for one in lesson.policy.trainable_parameters()]
            gradients.append(torch.cat([one.flatten() for one in parts if one is not None]))
        found[str(number)] = float(torch.stack(gradients).double().var(dim=0).sum())
        say(f"m = {number}: variance {found[str(number)]:.3g}")
    if found[str(SAMPLES[0])] == 0:
        raise SystemExit("all draws were the same: raise --redraws or --batch")
    return found


def points(results: dict[str, Any], name: str, staleness: int) -> tuple[Rate, list[float]]:
    """Success of all seeds together, and each one's distance."""
    start = f"{name}|{staleness}|"
    found = [point for key, point in results["points"].items() if key.startswith(start)]
    hits, counts = (sum(point[key] for point in found) for key in ("hits", "count"))
    return Rate(hits=hits, count=counts), [point["kl"] for point in found]


def table(results: dict[str, Any], stalenesses: Sequence[int]) -> str:
    """All results as Markdown."""
    lines = ["| success; nats from the teacher | "]
    lines[0] += " | ".join(f"staleness {one}" for one in stalenesses) + " |"
    lines.append("|" + "---|" * (len(stalenesses) + 1))
    for name in OBJECTIVES:
        cells = []
        for staleness in stalenesses:
            rate, distances = points(results, name, staleness)
            cells.append(f"{rate.shown}; {np.mean(distances):.4f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    one = results["variance"]["1"]
    lines += ["", "| m | " + " | ".join(results["variance"]) + " |"]
    lines.append("|" + "---|" * (len(results["variance"]) + 1))
    shares = [f"{value / one:.3f}" for value in results["variance"].values()]
    return "\n".join([*lines, "| variance, of m = 1 | " + " | ".join(shares) + " |"])


def draw(results: dict[str, Any], stalenesses: Sequence[int], path: Path) -> None:
    """Success and distance against staleness, variance against m."""
    figure = Figure(figsize=(14, 4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for name in OBJECTIVES:
        found = [points(results, name, staleness) for staleness in stalenesses]
        rates = [rate for rate, _ in found]
        # Of 0 or all hits, rounding puts an end of the interval beyond the value.
        below = [max(rate.value - rate.interval[0], 0.0) for rate in rates]
        above = [max(rate.interval[1] - rate.value, 0.0) for rate in rates]
        values = [rate.value for rate in rates]
        left.errorbar(stalenesses, values, yerr=[below, above], marker="o", capsize=3)
        distances = [float(np.mean(each)) for _, each in found]
        middle.plot(stalenesses, distances, marker="o", label=name)
    left.set(xlabel="staleness (policy versions)", ylabel="success", ylim=(0, 1.02))
    left.set_title("Success after equal steps", loc="left")
    middle.set(xlabel="staleness (policy versions)", ylabel="nats per token")
    middle.set_title("Distance from the teacher", loc="left")
    middle.legend(fontsize=8)
    numbers = [int(one) for one in results["variance"]]
    shares = [value / results["variance"]["1"] for value in results["variance"].values()]
    right.loglog(numbers, shares, marker="o", label="measured")
    right.loglog(numbers, [1 / one for one in numbers], linestyle=":", color="grey", label="1 / m")
    right.set(xlabel="side samples per position, m", ylabel="variance of the gradient, of m = 1")
    right.set_title("What more samples are worth", loc="left")
    right.legend()
    figure.savefig(path)
    say(f"drawn: {path}")


def _load(config: TrainerConfig) -> Policy:
    return Policy.load(
        str(MODEL),
        device=config.device,
        dtype=config.dtype,
        chunk_tokens=config.logprob_chunk_tokens,
    )


if __name__ == "__main__":
    main()
