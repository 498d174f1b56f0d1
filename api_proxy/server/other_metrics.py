"""Metrics of the run's other processes: files in Prometheus' text format, one for each process.

Each is replaced as a whole by its process, so it can be read at any time. A process that died
leaves its last one; its age is shown with it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_MOST_BYTES = 4 * 2**20
_AGE = "opd_process_metrics_age_seconds"


def other_metrics(folder: Path | None) -> bytes:
    """All files' text and their ages; empty without a file. It reads files, so not on the loop."""
    if folder is None or not folder.is_dir():
        return b""
    parts: list[bytes] = []
    ages: list[str] = []
    for path in sorted(folder.glob("*.prom")):
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size <= _MOST_BYTES:
                parts.append(file.read())
        ages.append(f'{_AGE}{{process="{path.stem}"}} {max(time.time() - status.st_mtime, 0.0)}')
    if not ages:
        return b""
    head = f"# HELP {_AGE} Seconds since the process wrote its metrics.\n# TYPE {_AGE} gauge\n"
    return b"".join(parts) + (head + "\n".join(ages) + "\n").encode()
