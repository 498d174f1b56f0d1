"""How many CPU threads torch computes with."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from transformers import PreTrainedModel

from rollout_bridge.embedded.model.supported import SMALL_BELOW

_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""What a container may use: microseconds of CPU time per period, or "max"; then the period."""


def set_threads(asked: int | None, model: PreTrainedModel) -> None:
    """Use `asked` threads. If it is None, a small model gets one; others get what torch chose
    (the machine's cores, or `OMP_NUM_THREADS`), but no more than a container may use. A second
    thread slows down the lab's model (hidden size 128), but makes prompts and training steps of
    SmolLM2-135M (576) 1.9 times as fast.
    """
    if asked is not None:
        torch.set_num_threads(asked)
    elif model.config.get_text_config().hidden_size < SMALL_BELOW:
        torch.set_num_threads(1)
    elif (cores := allowed_cores(_QUOTA)) is not None:
        torch.set_num_threads(min(torch.get_num_threads(), cores))


def allowed_cores(quota: Path) -> int | None:
    """Cores that the quota in this file allows, at least one; None without a quota."""
    try:
        used, period = quota.read_text().split()
        return max(math.ceil(int(used) / int(period)), 1)
    except (OSError, ValueError):
        return None
