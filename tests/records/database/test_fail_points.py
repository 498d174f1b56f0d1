"""A process dies where it is told to, at the visit that it is told, and nowhere else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

PROGRAM = """
from records.database import fail_points
for number in range(1, 4):
    fail_points.reach("other.committed")
    fail_points.reach("record.committed")
    print(number, flush=True)
"""


def run(value: str | None) -> subprocess.CompletedProcess[str]:
    environment = {key: text for key, text in os.environ.items() if key != "OPD_FAIL_POINT"}
    if value is not None:
        environment["OPD_FAIL_POINT"] = value
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("value", "printed", "status"),
    [
        (None, "1\n2\n3\n", 0),
        ("record.committed:2", "1\n", -signal.SIGKILL),
        ("record.committed:4", "1\n2\n3\n", 0),
        ("unknown.committed:1", "1\n2\n3\n", 0),
    ],
    ids=["unset", "second visit", "no such visit", "no such place"],
)
def test_a_process_dies_at_the_named_visit(value: str | None, printed: str, status: int) -> None:
    process = run(value)
    assert (process.stdout, process.returncode) == (printed, status)


@pytest.mark.parametrize("value", ["", "record.committed", "record.committed:0", ":1", "a:b"])
def test_a_value_that_names_no_place_is_refused_with_the_form_of_one(value: str) -> None:
    process = run(value)
    assert process.returncode == 1
    assert "write NAME:COUNT" in process.stderr
