"""The objective's own share of a training step on the tool lab's model.

    python -m benchmarks.objective_cost

A whole step is timed. Its objective is everything except the model: assembling the batch, rollout
correction, the loss forward and backward down to the log-probs that the model gave, and the
reports. Medians of several steps on batches of 16 turns of the lab's lengths; the share must stay
under 5%.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import trainer.step.update as update_module
from examples.tool_lab.run_lab import MODEL
from records.types import Ids, ReadySample, Teaching, VersionSpan
from trainer.batch.token_batch import BatchTotals, Correction
from trainer.config import TrainerConfig
from trainer.model.policy import Policy
from trainer.objectives.batch import Support, TokenBatch
from trainer.objectives.frame import objective_loss
from trainer.step.update import Updater

LIMIT = 0.05
OBJECTIVES: dict[str, dict[str, Any]] = {
    "hindsight_opd": {},
    "topk_tail_reverse_kl": {
        "objective": {"name": "topk_tail_reverse_kl", "topk": 8},
        "teacher": {"kind": "frozen"},
    },
    "self_distillation": {
        "objective": {"name": "self_distillation", "topk": 16},
        "teacher": {"kind": "frozen"},
    },
    "overlap_topk": {"objective": {"name": "overlap_topk"}, "teacher": {"kind": "frozen"}},
    "side_samples": {
        "objective": {"name": "side_samples", "samples": 16},
        "teacher": {"kind": "frozen"},
    },
}


def main() -> None:
    """Print a line per objective; exit 1 if one exceeds the limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    worst = 0.0
    for name, values in OBJECTIVES.items():
        whole, own = measure(name, values, arguments.model, arguments.steps)
        worst = max(worst, own / whole)
        print(
            f"{name:22} step {1e3 * whole:7.1f} ms, objective {1e3 * own:6.2f} ms: "
            f"{own / whole:.1%} (limit {LIMIT:.0%})"
        )
    raise SystemExit(0 if worst < LIMIT else 1)


def measure(name: str, values: dict[str, Any], model: str, steps: int) -> tuple[float, float]:
    """Median seconds of a step, and of everything in it except the model."""
    config = TrainerConfig.model_validate({"beta_kl": 0.02, **values})
    policy, start = (_load(model, config) for _ in range(2))
    teacher = start.freeze() if config.teacher.in_trainer else None
    updater = Updater(policy, start.freeze(), config, teacher=teacher)
    clock = Clock()
    originals = (update_module.assemble, BatchTotals.add, Correction.report)
    update_module.assemble = clock.timed(update_module.assemble)
    BatchTotals.add = clock.timed(BatchTotals.add)  # type: ignore[method-assign]
    Correction.report = clock.timed(Correction.report)  # type: ignore[method-assign]
    updater.loss_function = clock.remembering  # type: ignore[assignment]
    wholes, owns = [], []
    try:
        for step in range(steps):
            samples = batch(policy.vocab_size, seed=step)
            samples = updater.draw_side_samples(samples) or samples
            clock.reset()
            begun = time.perf_counter()
            updater.update(samples, step)
            wholes.append(time.perf_counter() - begun)
            owns.append(clock.seconds + sum(_on_leaves(*seen) for seen in clock.seen))
    finally:
        update_module.assemble, BatchTotals.add, Correction.report = originals  # type: ignore[method-assign]
    return statistics.median(wholes[2:]), statistics.median(owns[2:])


class Clock:
    """Adds up the time of wrapped functions, and remembers the loss's arguments."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.seconds = 0.0
        self.seen: list[tuple[Any, ...]] = []

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, with its time added to `seconds`."""

        def run(*arguments: Any) -> Any:
            begun = time.perf_counter()
            result = function(*arguments)
            self.seconds += time.perf_counter() - begun
            return result

        return run

    def remembering(self, *arguments: Any) -> Any:
        """The unchanged loss; its arguments are remembered."""
        self.seen.append(arguments)
        return objective_loss(*arguments)


def _on_leaves(tokens: TokenBatch, *settings: Any) -> float:
    """Seconds of the loss, forward and backward, with the model's outputs as leaves."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor) and value.requires_grad:
            return value.detach().clone().requires_grad_()
        return value

    support = tokens.support
    if support is not None:
        support = replace(
            support, **{f.name: leaf(getattr(support, f.name)) for f in fields(Support)}
        )
    values = {f.name: leaf(getattr(tokens, f.name)) for f in fields(TokenBatch)}
    fresh = replace(tokens, **(values | {"support": support}))
    if tokens.logprobs_sampled_BT is tokens.logprobs_BT:
        fresh = replace(fresh, logprobs_sampled_BT=fresh.logprobs_BT)
    begun = time.perf_counter()
    objective_loss(fresh, *settings).loss.backward()
    return time.perf_counter() - begun


def batch(vocab_size: int, seed: int) -> list[ReadySample]:
    """16 turns as long as the lab's: prompts of 250 to 450 tokens, responses of 15 to 40."""
    generator = np.random.default_rng(seed)

    def ids(low: int, high: int) -> Ids:
        return generator.integers(0, vocab_size, generator.integers(low, high)).astype(np.int32)

    samples = []
    for index in range(16):
        prompt, response = ids(250, 450), ids(15, 40)
        length = len(response)
        teacher = generator.normal(-3, 1, length).astype(np.float32)
        samples.append(
            ReadySample(
                turn_id=f"{seed}-{index}",
                session_id=f"{seed}-{index}",
                prompt_ids=prompt,
                response_ids=response,
                rollout_logprobs=generator.normal(-3, 1, length).astype(np.float32),
                teacher_logprobs=teacher,
                temperature=1.0,
                distribution_modified=None,
                version_spans=(VersionSpan(version=0, start=0, end=length),),
                hint="a hint of some words",
                created_at=0.0,
                teachings=(
                    Teaching(
                        candidate=0,
                        hint="a hint of some words",
                        teacher="teacher",
                        teacher_version="0",
                        hinted_prompt_ids=np.concatenate([prompt, ids(8, 12)]),
                        teacher_logprobs=teacher,
                    ),
                ),
            )
        )
    return samples


def _load(model: str, config: TrainerConfig) -> Policy:
    return Policy.load(
        str(Path(model)),
        device=config.device,
        dtype=config.dtype,
        chunk_tokens=config.logprob_chunk_tokens,
    )


if __name__ == "__main__":
    main()
