from __future__ import annotations

import subprocess
import sys

import pytest

from trainer.model.heap import heap_environment

_FRAGMENTED = """
import os, sys
from pathlib import Path
import torch
from trainer.model.heap import give_back, keep_large_blocks, map_large_blocks

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 // 2**20

def grown(how):
    if how == "mapped":
        assert map_large_blocks()
    if how.startswith("kept"):
        assert keep_large_blocks()
    size = 2**16 if how == "given back" else 2 * 2**20
    torch.ones(4 * 2**20)  # glibc raises its limit to the largest block that was freed
    before, small, large = resident(), [], []
    for _ in range(64):
        large += [torch.ones(size) for _ in range(2 * 2**20 // size)]
        small.append(torch.ones(2**12))
    del large
    if how.endswith("given back"):
        give_back()
    return resident() - before

torch.set_num_threads(1)
for how in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        print(grown(how), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def grown(*ways: str) -> list[int]:
    """MiB that stay with a process after 512 MiB of tensors between small ones were freed.

    One for each way, each in a process of its own with the same heap at its start.
    """
    command = [sys.executable, "-c", _FRAGMENTED, *ways]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [int(line) for line in done.stdout.splitlines()]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's heap")
def test_freed_tensors_are_the_systems_again() -> None:
    ways = ["mapped", "given back", "kept, then given back", "kept", "as it is"]
    mapped, given_back, kept_then_given_back, kept, as_it_is = grown(*ways)
    assert mapped < 64
    assert given_back < 64
    assert kept_then_given_back < 64
    assert kept > 256
    assert as_it_is > 256


def test_tunables_that_are_set_stay() -> None:
    assert heap_environment({}) == {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    given = {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}
    assert heap_environment(given) == {
        "GLIBC_TUNABLES": "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"
    }
