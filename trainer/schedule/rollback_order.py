"""RUN/rollback: the trainer goes back to an older version at its next check, or when it starts.

The order is removed once the version that restores the older one is published. It knows no weights.
"""

from __future__ import annotations

import os
from pathlib import Path

from trainer.errors import CheckpointError

ROLLBACK_FILE = "rollback"


def order_rollback(folder: Path, version: int) -> None:
    """Write it, whole or not at all; it replaces an order that has not been followed yet."""
    temporary = folder / f"{ROLLBACK_FILE}.new"
    temporary.write_text(f"{version}\n", encoding="utf-8")
    os.replace(temporary, folder / ROLLBACK_FILE)


def read_rollback(folder: Path) -> int | None:
    """The version to go back to, if that is ordered. Raises CheckpointError for other content."""
    path = folder / ROLLBACK_FILE
    try:
        text = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    if not text.isdecimal():
        raise CheckpointError(f"{path}: {text[:40]!r} is not a version; delete the file")
    return int(text)


def remove_rollback(folder: Path) -> None:
    """The order was followed, or cannot be."""
    (folder / ROLLBACK_FILE).unlink(missing_ok=True)
