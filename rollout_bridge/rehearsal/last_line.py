"""The last line of a file of lines that grows, without reading those before it."""

from __future__ import annotations

import os
from pathlib import Path

METRICS_FILE = "metrics.jsonl"
"""A line for each step, in a run's folder."""
_BLOCK = 65_536


def last_line(path: Path) -> str | None:
    """None without one; an unfinished line of a killed process does not count."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        end = begin = file.seek(0, os.SEEK_END)
        tail = b""
        while begin > 0 and tail.rstrip(b"\n").count(b"\n") < 2:
            begin = max(begin - _BLOCK, 0)
            file.seek(begin)
            tail = file.read(end - begin)
    lines = [line for line in tail.splitlines(keepends=True) if line.endswith(b"\n")]
    return lines[-1].decode() if lines else None
