"""Whether a version may be trained further: not before the guard has checked it."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from rollout_bridge.guard.checks import FILE, Checked, last_check

logger = logging.getLogger(__name__)

_SAY_EVERY_S = 60.0


class CheckWait:
    """Reads RUN/guard.jsonl again only when it has grown."""

    def __init__(self, folder: Path, *, is_on: bool) -> None:
        self._folder, self._is_on = folder, is_on
        self._size = -1
        self._row: Checked | None = None
        self._since: float | None = None
        self._said = 0.0

    def awaits(self, version: int) -> bool:
        """Whether `version` has yet to be checked; the start needs no check. While it waits, this
        is logged every minute.
        """
        if not self._is_on or version == 0 or self._is_checked(version):
            self._since = None
            return False
        now = time.monotonic()
        if self._since is None:
            self._since = self._said = now
        elif now - self._said >= _SAY_EVERY_S:
            self._said = now
            logger.warning(
                "no step for %.0f s: the guard has not checked version %d (is the judge's process "
                "running?)",
                now - self._since,
                version,
            )
        return True

    def _is_checked(self, version: int) -> bool:
        path = self._folder / FILE
        size = path.stat().st_size if path.exists() else 0
        if size != self._size:
            self._size, self._row = size, last_check(self._folder)
        row = self._row
        return row is not None and row.version == version and not row.breaches
