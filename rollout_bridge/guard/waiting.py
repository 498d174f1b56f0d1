"""Whether a version may be trained further: not before the guard has checked it."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from rollout_bridge.guard.checks import Verdicts

logger = logging.getLogger(__name__)

_SAY_EVERY_S = 60.0
LAST_CHECK_S = 600.0
"""How long what has nothing more to train waits for the check of the last version."""


class CheckWait:
    """What the guard says of the newest version, if it `is_on`."""

    def __init__(self, folder: Path, *, is_on: bool) -> None:
        self.is_on = is_on
        self._verdicts = Verdicts(folder) if is_on else None
        self._since: float | None = None
        self._said = 0.0

    def awaits(self, version: int, *, served: int | None = None) -> bool:
        """Whether `version` has yet to pass; the start needs no check. While it waits, this is
        logged every minute, with the version that is `served` in its place, if it is not itself.
        """
        if self.may_serve(version):
            self._since = None
            return False
        now = time.monotonic()
        if self._since is None:
            self._since = self._said = now
        elif now - self._said >= _SAY_EVERY_S:
            self._said = now
            logger.warning(
                "no step for %.0f s: the guard has not checked version %d (is the judge's process "
                "running?)%s",
                now - self._since,
                version,
                "" if served is None else f"; version {served} is served until then",
            )
        return True

    def may_serve(self, version: int) -> bool:
        """Whether nothing speaks against `version`: it passed, or needs no check."""
        return self._verdicts is None or version == 0 or self._verdicts.passed(version)
