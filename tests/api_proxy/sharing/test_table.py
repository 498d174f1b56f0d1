"""What several processes keep in one memory: against a dictionary, with many processes at once, and
when one is killed in the middle.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_proxy.sharing.memory import Memory
from api_proxy.sharing.table import Shape, Table

SHAPE = Shape(buckets=64, value_bytes=12)
KEYS = st.sampled_from([f"key {number}" for number in range(20)])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), KEYS, st.binary(max_size=12)),
        st.tuples(st.sampled_from(["get", "pop", "add"]), KEYS, st.just(b"")),
    ),
    max_size=60,
)
PROCESSES, CLAIMS = 4, 300

CLAIMER = """
import sys
from api_proxy.sharing.memory import Memory
from api_proxy.sharing.table import Shape, Table
descriptor, size, claims = (int(word) for word in sys.argv[1:])
table = Table(Memory(size, descriptor), 0, Shape(buckets=512, value_bytes=12))
sys.stdin.readline()
for number in range(claims):
    if table.add(f"turn {number}"):
        print(number)
    with table.held("counter") as cell:
        cell.value = (int.from_bytes(cell.value or b"") + 1).to_bytes(8)
"""
HOLDER = """
import sys, time
from api_proxy.sharing.memory import Memory
from api_proxy.sharing.table import Shape, Table
descriptor, size = (int(word) for word in sys.argv[1:])
with Table(Memory(size, descriptor), 0, Shape(buckets=64, value_bytes=12)).held("key") as cell:
    print("held", flush=True)
    time.sleep(60)
"""


def started(program: str, memory: Memory, *words: int) -> subprocess.Popen[str]:
    assert memory.descriptor is not None
    size = len(memory.bytes)
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, (memory.descriptor, size, *words))],
        pass_fds=(memory.descriptor,),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@given(STEPS)
def test_it_does_what_a_dictionary_does(steps: Sequence[tuple[str, str, bytes]]) -> None:
    table, known = Table(Memory(SHAPE.num_bytes), 0, SHAPE), dict[str, bytes]()
    for what, key, value in steps:
        match what:
            case "put":
                table.put(key, value)
                known[key] = value
            case "get":
                assert table.get(key) == known.get(key)
            case "pop":
                assert table.pop(key) == known.pop(key, None)
            case "add":
                assert table.add(key) is (key not in known)
                known[key] = b""
    assert {key: table.get(key) for key in known} == known


def test_in_a_full_bucket_what_was_written_longest_ago_makes_room() -> None:
    shape = Shape(buckets=1, value_bytes=8)
    table = Table(Memory(shape.num_bytes), 0, shape)
    for number in range(8):
        table.put(f"{number}", b"old")
    table.put("0", b"new")
    table.put("8", b"new")
    assert [table.get(f"{number}") for number in range(9)] == [
        b"new",
        None,
        *[b"old"] * 6,
        b"new",
    ]


def change_and_fail(table: Table) -> None:
    with table.held("key") as cell:
        cell.value = b"half"
        raise ZeroDivisionError


def test_a_value_that_is_too_long_is_refused_and_changes_nothing() -> None:
    table = Table(Memory(SHAPE.num_bytes), 0, SHAPE)
    table.put("key", b"short")
    with pytest.raises(ValueError, match="13 bytes do not fit 12"):
        table.put("key", bytes(13))
    with pytest.raises(ZeroDivisionError):
        change_and_fail(table)
    assert table.get("key") == b"short"


def test_of_many_processes_one_gets_each_claim_and_no_count_is_lost() -> None:
    shape = Shape(buckets=512, value_bytes=12)
    memory = Memory.shared(shape.num_bytes)
    claimers = [started(CLAIMER, memory, CLAIMS) for _ in range(PROCESSES)]
    time.sleep(0.5)
    for one in claimers:
        assert one.stdin is not None
        one.stdin.write("go\n")
        one.stdin.flush()
    claimed = [int(line) for one in claimers for line in one.communicate(timeout=60)[0].split()]
    assert sorted(claimed) == list(range(CLAIMS))
    counted = Table(memory, 0, shape).get("counter")
    assert counted is not None
    assert int.from_bytes(counted) == PROCESSES * CLAIMS


def test_a_killed_process_leaves_no_lock_and_a_stopped_one_is_not_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    memory = Memory.shared(SHAPE.num_bytes)
    table = Table(memory, 0, SHAPE)
    table.put("key", b"before")
    holder = started(HOLDER, memory)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    os.kill(holder.pid, signal.SIGSTOP)
    assert table.get("key") == b"before"
    assert caplog.messages == ["a worker holds what the workers share: going on without it"]
    holder.kill()
    holder.communicate(timeout=60)
    caplog.clear()
    table.put("key", b"after")
    assert table.get("key") == b"after"
    assert caplog.messages == []
