"""RUN/hold.json: generation waits, because training is as far behind as its schedule allows.

The trainer writes and removes the file; whoever starts generation checks whether it exists. The
trainer keeps it locked as long as it lives, so the file of a killed trainer holds nothing up, and
neither does one whose `until` has passed. The check costs one system call without a file, and three
with one.

    hold.json   {"version": 7, "why": "a batch of version 7 is full", "since": 1.0, "until": 301.0}
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

HOLD_FILE = "hold.json"
HoldEnd = Literal["ended", "max_hold", "trainer_gone"]
"""Removed by the trainer; past its `until`; its trainer is dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldRules:
    """As the settings of the same names in [trainer]."""

    schedule: Literal["async", "sync", "step_off"]
    steps_off: int | None
    max_hold_s: float

    @property
    def holds_generation(self) -> bool:
        """Whether the schedule ever holds requests."""
        return self.schedule != "async"


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldOrder:
    """`version` is that of the newest weights; `since` and `until` are unix seconds."""

    version: int
    why: str
    since: float
    until: float


class HoldWriter:
    """The trainer's side. A file that another trainer left is removed at once."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / HOLD_FILE
        self._descriptor: int | None = None
        self._path.unlink(missing_ok=True)

    def write(self, order: HoldOrder) -> None:
        """Make generation wait from here on; this writer must have no order yet."""
        assert self._descriptor is None
        temporary = self._path.with_suffix(".new")
        # Not inherited: a child that outlives its parent must not keep the parent's lock.
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._descriptor = os.open(temporary, flags, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(self._descriptor, json.dumps(asdict(order)).encode() + b"\n")
        os.replace(temporary, self._path)

    def remove(self) -> None:
        """Make nothing wait from here on."""
        self._path.unlink(missing_ok=True)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class HoldFile:
    """The side of those who start generation."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = folder / HOLD_FILE
        self._clock = clock

    def current(self) -> HoldOrder | HoldEnd:
        """The order that holds now, or why none does."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return "ended"
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            order = HoldOrder(**json.loads(os.read(descriptor, 4096)))
            return order if self._clock() < order.until else "max_hold"
        finally:
            os.close(descriptor)
        return "trainer_gone"

    def holds(self) -> HoldOrder | None:
        """The order that holds now; None if nothing has to wait."""
        found = self.current()
        return found if isinstance(found, HoldOrder) else None
