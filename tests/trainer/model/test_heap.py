from __future__ import annotations

import subprocess
import sys

import pytest

from trainer.model.heap import heap_environment

_FRAGMENTED = """
import sys
from pathlib import Path
from trainer.model.heap import give_back, keep_large_blocks, map_large_blocks
if sys.argv[1] == "mapped":
    assert map_large_blocks()
if sys.argv[1].startswith("kept"):
    assert keep_large_blocks()
size = 2**16 if sys.argv[1] == "given back" else 2 * 2**20
import torch

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 // 2**20

torch.ones(4 * 2**20)  # glibc raises its limit to the largest block that was freed
before, small, large = resident(), [], []
for _ in range(64):
    large += [torch.ones(size) for _ in range(2 * 2**20 // size)]
    small.append(torch.ones(2**12))
del large
if sys.argv[1].endswith("given back"):
    give_back()
print(resident() - before)
"""


def grown(how: str) -> int:
    """MiB that stay with a process after 512 MiB of tensors between small ones were freed."""
    command = [sys.executable, "-c", _FRAGMENTED, how]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's heap")
def test_freed_tensors_are_the_systems_again() -> None:
    assert grown("mapped") < 64
    assert grown("given back") < 64
    assert grown("kept, then given back") < 64
    assert grown("kept") > 256
    assert grown("as it is") > 256


def test_tunables_that_are_set_stay() -> None:
    assert heap_environment({}) == {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    given = {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}
    assert heap_environment(given) == {
        "GLIBC_TUNABLES": "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"
    }
