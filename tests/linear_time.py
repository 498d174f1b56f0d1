"""Whether work grows with its size and not with its square, on a machine that others use too."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

ROUNDS = 60


def growth(few: Callable[[], object], many: Callable[[], object], *, below: float) -> float:
    """How many times as long `many` takes as `few`: the ratio of the least processor times.

    Neighbours only make times longer, so rounds go on until the ratio is below `below`, at most
    ROUNDS of them. Work that is slower by its nature stays above it in each.
    """
    ratio = least_few = least_many = float("inf")
    gc.disable()  # what lies around in this process would be counted as the longer work's
    try:
        for _ in range(ROUNDS):
            least_few = min(least_few, _cpu_s(few))
            least_many = min(least_many, _cpu_s(many))
            ratio = least_many / least_few
            if ratio < below:
                break
    finally:
        gc.enable()
    return ratio


def _cpu_s(work: Callable[[], object]) -> float:
    """Processor time of this thread."""
    begin = time.thread_time()
    work()
    return time.thread_time() - begin
