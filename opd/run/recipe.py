"""How a new `opd serve` run learns, unless told otherwise.

Small adapters at a high rate, the exact reverse KL to the teacher over its likeliest tokens and
their rest, a pull to the start, and rehearsal: hints that come back on recorded states, with
lessons that keep what users ask for openly and everything else (docs/learning.md). Four passes over
each batch: what a pass takes from open wishes the next one gives back, before anybody is served.
The lab's recipe differs where docs/tool_lab.md says why.
"""

from __future__ import annotations

import math
from typing import Any

from opd.run.config import RunConfig

TOP_K = 8
LEAST_FALL = 0.5
"""Nats. A hint that the answer lacked lowers one of its tokens by 3 to 10 for the lab's model, one
that the judge misread by at most 0.05 (docs/learning.md).
"""
_MEASURED_WIDTH = 128
"""Where the rates were measured: the lab's model."""
_LORA_RATE = 3e-4
"""Of the adapters (docs/learning.md)."""
_FULL_RATE = 1e-4
"""Of full weights: that of the runs in docs/tool_lab.md, which trained all weights. They learned
from live turns alone; with rehearsal it is not measured.
"""
_UNKNOWN_WIDTH = 2048
ADAM_BETAS = (0.5, 0.95)
"""A wish is learned in six to ten steps. With the usual 0.9 the steps that should win back an open
wish still follow those that lost it (docs/learning.md).
"""


def recipe(width: int | None, full_weights: bool = False) -> dict[str, Any]:
    """Values to lay under those that are given, for a model of this hidden size; None: not known
    yet. `full_weights`: without adapters, at a rate that goes with that.
    """
    weights = {} if full_weights else {"lora": {"rank": 8, "alpha": 16}}
    return {
        "judge": {"selection": "longest_first"},
        "scoring": {"top_k": TOP_K, "least_fall": LEAST_FALL},
        "trainer": {
            "objective": {"name": "topk_tail_reverse_kl", "topk": TOP_K},
            "beta_kl": 0.02,
            **weights,
            "learning_rate": learning_rate(width, full_weights=full_weights),
            "adam_betas": ADAM_BETAS,
            "rollout_batch_size": 24,
            "epochs_per_batch": 4,
        },
        "rehearsal": {"enabled": True},
    }


def learning_rate(width: int | None, *, full_weights: bool) -> float:
    """The rate for a model of this hidden size, falling with its root; None: not known.

    At 2,048 it is 7.5e-5 for adapters and 2.5e-5 for full weights, four times for each batch.
    """
    measured = _FULL_RATE if full_weights else _LORA_RATE
    rate = measured * math.sqrt(_MEASURED_WIDTH / (width or _UNKNOWN_WIDTH))
    return float(f"{rate:.2g}")


def said(config: RunConfig) -> str:
    """The recipe in one line, with what to expect of it."""
    trainer = config.trainer
    weights = "full weights" if trainer.lora is None else f"LoRA of rank {trainer.lora.rank}"
    line = (
        f"learns by {trainer.objective.name}, {weights}, rate {trainer.learning_rate:g}, "
        f"{trainer.rollout_batch_size} samples a step in {trainer.epochs_per_batch} passes, KL to "
        f"the start {trainer.beta_kl:g}"
    )
    if not config.rehearsal.enabled:
        return f"{line}; without rehearsal a wish needs some hundred objections"
    counter, keep = trainer.lesson_shares.of(trainer.rollout_batch_size)
    return (
        f"{line}; while a hint is practised {counter} samples hold open wishes for the opposite "
        f"and {keep} everything else, at weight {trainer.lesson_hold_weight:g}; expect an accepted "
        f"hint to be practised once {config.rehearsal.min_messages} recorded requests are of its "
        "kind, "
        f"for 5 to 20 steps, until {1 - config.rehearsal.rest_at:.0%} of its gap has closed"
    )
