"""RUN/rollback: the trainer goes back to an older version at its next check, or when it starts.

The order is removed once the version that restores the older one is published. It knows no weights.
On a cluster the launch follows it. Engines end there on the way back, so the order then also says
which version they served last: what that one trained on is not trained again.
"""

from __future__ import annotations

import os
from pathlib import Path

from rollout_bridge.stop_order import ROLLBACK_FILE
from trainer.errors import CheckpointError


def order_rollback(folder: Path, version: int, *, served: int | None = None) -> None:
    """Write it, whole or not at all; it replaces an order that has not been followed yet. `served`:
    the newest version that was served.
    """
    temporary = folder / f"{ROLLBACK_FILE}.new"
    words = [version] if served is None else [version, served]
    temporary.write_text(" ".join(map(str, words)) + "\n", encoding="utf-8")
    os.replace(temporary, folder / ROLLBACK_FILE)


def read_rollback(folder: Path) -> int | None:
    """The version to go back to, if that is ordered. Raises CheckpointError for other content."""
    words = _words(folder)
    return None if words is None else words[0]


def last_served(folder: Path) -> int | None:
    """The newest version that was served before a rollback, if the order says it. Raises
    CheckpointError like `read_rollback`.
    """
    words = _words(folder)
    return None if words is None or len(words) == 1 else words[1]


def remove_rollback(folder: Path) -> None:
    """The order was followed, or cannot be."""
    (folder / ROLLBACK_FILE).unlink(missing_ok=True)


def _words(folder: Path) -> list[int] | None:
    path = folder / ROLLBACK_FILE
    try:
        text = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    words = text.split()
    if len(words) not in (1, 2) or not all(word.isdecimal() for word in words):
        raise CheckpointError(f"{path}: {text[:40]!r} is not a version; delete the file")
    return [int(word) for word in words]
