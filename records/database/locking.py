"""A lock between the processes of one host that none can take twice while another waits.

SQLite's own lock is not fair: a waiting process sleeps for up to 100 ms between attempts while the
holder takes it again at once. With four busy processes, some writes waited for five seconds. Here a
waiting process holds the door: the previous holder has to queue behind it. The kernel frees both
locks when a process dies.

It only orders writers that use it; SQLite's lock still protects the data from everyone else.
"""

from __future__ import annotations

import fcntl
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_S = 0.001


class FairFileLock:
    """Two advisory locks, door and room, in files of their own. One user at a time per instance."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._door, self._room = (
            os.open(f"{path}{suffix}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            for suffix in ("-door", "-room")
        )

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock for the block. Raises TimeoutError after `timeout_s` of waiting."""
        deadline = time.monotonic() + self._timeout_s
        _wait(self._door, deadline)
        try:
            _wait(self._room, deadline)
        finally:
            fcntl.flock(self._door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self._room, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close both files, which frees what is held."""
        os.close(self._door)
        os.close(self._room)


def _wait(descriptor: int, deadline: float) -> None:
    # Polling, because a blocking flock has no deadline and a stopped process would block everyone.
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError("database is locked: another process is writing") from None
            time.sleep(_POLL_S * random.uniform(0.5, 1.5))
