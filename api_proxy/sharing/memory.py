"""Bytes that several processes see, and short locks on parts of them.

The kernel frees a lock when its holder dies, so a killed worker leaves none behind. A process that
is alone needs no locks.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

_PATIENCE_S = 0.02
"""How long to wait for a lock that is held for microseconds: only a process that was stopped in
the middle holds it longer, and the event loop must not wait for that one.
"""
_POLL_S = 0.0002


class Memory:
    """`size` bytes, all zero at first; those of the file `descriptor`, or this process's own."""

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        self.descriptor = descriptor
        self.bytes = mmap.mmap(-1 if descriptor is None else descriptor, size)

    @classmethod
    def shared(cls, size: int) -> Memory:
        """New memory for this process and the children that inherit its descriptor."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("opd-endpoint")
        else:  # not on macOS: a file that has no name
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, size)
        return cls(size, descriptor)

    @contextmanager
    def locked(self, start: int, length: int) -> Iterator[None]:
        """Keep other processes out of these bytes for the block, which must not wait."""
        # Locks of fcntl belong to the process. Those of flock would belong to the file that all
        # have inherited.
        held = self.descriptor is not None and _lock(self.descriptor, start, length)
        try:
            yield
        finally:
            if held and self.descriptor is not None:
                fcntl.lockf(self.descriptor, fcntl.LOCK_UN, length, start)


def _lock(descriptor: int, start: int, length: int) -> bool:
    """Whether the lock was there in time."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                logger.warning("a worker holds what the workers share: going on without it")
                return False
            time.sleep(_POLL_S)
