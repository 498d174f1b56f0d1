"""How many CPU threads torch computes with, and which threads of a process may start them.

torch's OpenMP library gives each thread that computes in parallel a team of its own. Between two
operations a team waits actively, unless the teams of a process have more threads than there are
cores: then every wait is a system call. A trainer computes in one thread (`in_thread`), since such
calls take a tenth of a step's time with SmolLM2-135M on two cores. An engine loads its model in
another thread than it decodes in, and so never waits actively: it would decode 1.3 times as fast
alone, but four to nine times as slowly beside a step, whose cores it would hold while it waits.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
from transformers import PreTrainedModel

from rollout_bridge.embedded.model.supported import SMALL_BELOW

P = ParamSpec("P")
T = TypeVar("T")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""What a container may use: microseconds of CPU time per period, or "max"; then the period."""


async def in_thread(
    thread: Executor, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """The result of `function`, computed in `thread`, the one that touches models; the event loop
    keeps running.
    """
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(thread, lambda: function(*args, **kwargs))


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
