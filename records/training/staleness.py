"""How old a sample is: trained steps on the surviving chain of versions.

Numbers of lost versions are not used again, so that a difference of numbers counts steps that no
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
