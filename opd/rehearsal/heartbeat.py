"""RUN/rehearsal.beat: touched while hints are examined, prepared, practised or measured.

It shows whoever waits for the hints to rest that work goes on while neither versions nor lessons
change: on a slow machine, the start model's answers to one open wish take minutes.
"""

from __future__ import annotations

import time
from pathlib import Path

FILE = "rehearsal.beat"
_EVERY_S = 5.0


class Heartbeat:
    """Called at each answer of a judge or an engine."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._touched: float | None = None

    def __call__(self) -> None:
        now = time.monotonic()
        if self._touched is None or now - self._touched >= _EVERY_S:
            self._touched = now
            self._path.touch()


def seconds_since(folder: Path) -> float | None:
    """Since the last beat; None: there was none."""
    try:
        return time.time() - (folder / FILE).stat().st_mtime
    except FileNotFoundError:
        return None
