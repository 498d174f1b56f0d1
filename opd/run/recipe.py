"""How a new `opd serve` run learns, unless told otherwise.

Small adapters at a high rate, the exact reverse KL to the teacher over its likeliest tokens and
their rest, a KL term to the start, and rehearsal: hints are practised on recorded states, with
lessons that preserve open wishes and everything else (docs/learning.md). Four passes over each
batch: what one pass takes from open wishes, the next one gives back, before anybody is served.
docs/tool_lab.md says where the lab's recipe differs, and why.
"""

from __future__ import annotations

from typing import Any

from opd.run.config import RunConfig

TOP_K = 8
LEAST_FALL = 0.5
"""Nats. With the lab's model, a hint that the answer lacked lowers one of the answer's tokens by 3
to 10; one that the judge misread, by at most 0.05 (docs/learning.md).
"""
_LORA_RATE = 3e-4
"""Rate of the adapters, whatever the model's width (docs/lora.md)."""
_FULL_RATE = 1e-4
"""Rate of full weights at `_MEASURED_WIDTH`: that of the runs in docs/tool_lab.md that trained all
weights.
"""
_MEASURED_WIDTH = 128
"""Hidden size of the lab's model."""
_UNKNOWN_WIDTH = 2048
ADAM_BETAS = (0.5, 0.95)
"""A wish is learned in six to ten steps. With the usual 0.9, the steps that should restore an open
wish still follow those that lost it (docs/learning.md).
"""


def recipe(width: int | None, full_weights: bool = False) -> dict[str, Any]:
    """Values below the given ones, for a model of this hidden size; None: not known yet.
    `full_weights`: without adapters, at a suitable rate.
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
    """The rate for a model of this hidden size; None: unknown. Each batch is passed four times.

    With Adam, a step moves each weight by about the rate. An adapter's first factor has entries of
    the size of the root of 1 / width, so a step of the second changes the layer's output by as much
    at any width. A full matrix changes it by width times as much: its rate falls with the width, to
    6.3e-6 at 2,048.
    """
    if not full_weights:
        return _LORA_RATE
    return float(f"{_FULL_RATE * _MEASURED_WIDTH / (width or _UNKNOWN_WIDTH):.2g}")


def said(config: RunConfig) -> str:
    """The recipe in one line, with what to expect from it."""
    trainer = config.trainer
    weights = "full weights" if trainer.lora is None else f"LoRA of rank {trainer.lora.rank}"
    line = (
        f"learns by {trainer.objective.name}, {weights}, rate {trainer.learning_rate:g}, "
        f"{trainer.rollout_batch_size} samples per step in {trainer.epochs_per_batch} passes, KL "
        f"to the start {trainer.beta_kl:g}"
    )
    if not config.rehearsal.enabled:
        return f"{line}; without rehearsal a wish needs some hundred objections"
    counter, keep = trainer.lesson_shares.of(trainer.rollout_batch_size)
    return (
        f"{line}; while a hint is practised, {counter} samples preserve open wishes for the "
        f"opposite and {keep} everything else, at weight {trainer.lesson_hold_weight:g}; expect an "
        f"accepted hint to be practised once {config.rehearsal.min_messages} recorded requests are "
        f"of its kind, for 5 to 20 steps, until {1 - config.rehearsal.rest_at:.0%} of its gap has "
        "closed"
    )
