"""The learning rate of each step."""

from __future__ import annotations

import math

from trainer.config import TrainerConfig


def learning_rate_at(step: int, config: TrainerConfig) -> float:
    """The rate of step `step` (0 is the first): up linearly over the warm-up, then by its style.

    linear and cosine fall from the peak to 0 at `max_steps`, like Megatron's styles of these names
    with that many decay iterations.
    """
    warmup, peak = config.warmup_steps, config.learning_rate
    if step < warmup:
        return peak * (step + 1) / warmup
    if config.lr_decay_style == "constant":
        return peak
    assert config.max_steps is not None
    done = min(1.0, (step - warmup) / (config.max_steps - warmup))
    if config.lr_decay_style == "linear":
        return peak * (1 - done)
    return peak * 0.5 * (1 + math.cos(math.pi * done))
