"""How old a sample is, in trained steps on the surviving chain of versions, and how far generation
may run ahead of training.

Numbers of lost versions are not reused, so a difference of numbers would also count steps that no
weights have seen. Pure functions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


def steps_since(chain: Sequence[int], version: int) -> int:
    """How many versions of `chain` (ascending, oldest first) are newer than `version`."""
    return len(chain) - bisect_right(chain, version)


def oldest_allowed(chain: Sequence[int], max_staleness: int) -> int:
    """The smallest version for which `steps_since` is at most `max_staleness`."""
    return chain[max(len(chain) - 1 - max_staleness, 0)]


def max_requests(*, batch_size: int, version: int, eta: int) -> int:
    """The largest number of samples ever admitted at `version`: (version + eta + 1) x batch_size.

    ALGORITHMS 6.2, closed form. `version` counts trained steps, `eta` the allowed staleness.
    """
    if batch_size <= 0 or eta < 0 or version < 0:
        raise ValueError(
            f"batch_size must be positive, eta and version not negative; "
            f"got {batch_size}, {eta}, {version}"
        )
    return (version + eta + 1) * batch_size


def admit(num_in_flight: int, batch: int, version: int, eta: int) -> bool:
    """Whether the request that brings the count of samples to `num_in_flight` may start.

    floor((num_in_flight - 1) / batch) <= version + eta (ALGORITHMS 6.2). In that rule, the count
    includes every sample ever generated and the new one. A caller that counts only samples not yet
    trained (in flight, ready, leased) passes version 0: the trained ones are version x batch, so
    both sides lose the same number.
    """
    if num_in_flight <= 0:
        raise ValueError(f"the count includes the request itself, got {num_in_flight}")
    return num_in_flight <= max_requests(batch_size=batch, version=version, eta=eta)
