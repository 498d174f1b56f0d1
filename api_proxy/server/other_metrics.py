"""Metrics of the run's processes: files in Prometheus' text format, one for each process.

Each is replaced as a whole by its process, so it can be read at any time. A process that died
leaves its last one; its age is shown with it. Workers of the endpoint have the same metrics, under
labels of their own: what belongs to one metric is put together.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

_MOST_BYTES = 4 * 2**20
_HELP = b"# HELP "
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
    return _by_metric(parts) + (head + "\n".join(ages) + "\n").encode()


def replace_metrics(folder: Path, name: str, text: bytes) -> None:
    """Write the file of the process `name`. Raises OSError."""
    path = folder / f"{name}.prom"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = folder / f"{name}.new"
    temporary.write_bytes(text)
    os.replace(temporary, path)


def _by_metric(texts: Sequence[bytes]) -> bytes:
    """The texts as one in which each metric stands once, with the samples of all."""
    found: dict[bytes, list[bytes]] = {}
    for text in texts:
        for part in (b"\n" + text).split(b"\n" + _HELP)[1:]:
            part = part.rstrip(b"\n") + b"\n"
            name, _, _ = part.partition(b" ")
            if name in found:
                _, _, part = part.split(b"\n", 2)  # its help and its type stand there already
            else:
                part = _HELP + part
            found.setdefault(name, []).append(part)
    return b"".join(part for parts in found.values() for part in parts)
