"""What the C library's heap does with freed tensors: give them back, or keep them for the next.

A step allocates and frees thousands of tensors of a few MiB, between small objects that stay. By
default glibc puts both into one heap, whose free pieces then fit nothing: two steps of SmolLM2-135M
on 2,048 tokens grew it to 5.9 GB (docs/models.md). Mapped separately, tensors leave no gaps, and
their memory returns to the system at once. But each new mapping costs page faults: a third to a
half of a step's time. So a trainer that does not save memory keeps freed tensors in the heap.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MAPPED_FROM = 2**20
_MOST = 2**25
"""glibc maps larger blocks in any case."""
_KEPT = 2**30
_HUGE_PAGES = "glibc.malloc.hugetlb=1"
_TUNABLES = "GLIBC_TUNABLES"


def map_large_blocks() -> bool:
    """Map every allocation from 1 MiB on separately; returns whether this C library can."""
    return _set({_M_MMAP_THRESHOLD: _MAPPED_FROM})


def keep_large_blocks() -> bool:
    """Keep freed tensors in the heap for the next ones; returns whether this C library can."""
    return _set({_M_MMAP_THRESHOLD: _MOST, _M_TRIM_THRESHOLD: _KEPT})


def _set(options: Mapping[int, int]) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    return set_option is not None and all(set_option(*one) == 1 for one in options.items())


def give_back() -> None:
    """Release free heap memory: that of tensors below 1 MiB, which short passes have."""
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def heap_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment a process must start with so that mapped blocks use large pages, which halves
    the time that mapping takes; glibc reads it only at start.
    """
    given = environment.get(_TUNABLES)
    return {_TUNABLES: _HUGE_PAGES if not given else f"{given}:{_HUGE_PAGES}"}
