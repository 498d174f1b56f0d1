"""How many connections there may be where a process may open few files."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from api_proxy.server.connections import room_for

PROGRAM = """
import resource, sys
from api_proxy.server.connections import raised_file_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
print(raised_file_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(("soft", "hard"), [(100, 900), (400, 400)])
def test_as_many_files_are_asked_for_as_there_may_be(soft: int, hard: int) -> None:
    """In a process of its own: a hard limit once lowered stays."""
    command = [sys.executable, "-c", PROGRAM, str(soft), str(hard)]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    assert told.stdout.split() == [str(hard), str(hard)]
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] != hard


@pytest.mark.parametrize(
    ("wanted", "limit", "room"),
    [(16_384, 1_048_576, 16_384), (100, 1_024, 100), (16_384, 1_024, 768), (16_384, 200, 100)],
)
def test_connections_leave_files_for_the_rest(
    wanted: int, limit: int, room: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert room_for(wanted, limit) == room
    told = f"at most {room} connections at once instead of {wanted} (proxy.max_connections)"
    assert (told in caplog.text) is (room < wanted)
    assert (f"may open {limit} files" in caplog.text) is (room < wanted)
