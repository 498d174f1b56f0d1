"""Places where a process kills itself, only for the crash test (docs/reliability.md).

A process started with `OPD_FAIL_POINT=NAME:COUNT` in its environment ends by SIGKILL when it
reaches the place NAME for the COUNTth time: nothing is flushed, closed or given back, as in a real
crash, but at an instant that chance would hardly ever hit. It is not a setting of a run: it affects
one start of one process. If it is unset, a place costs one comparison.
"""

from __future__ import annotations

import itertools
import os
import signal

VARIABLE = "OPD_FAIL_POINT"


def parse(text: str | None) -> tuple[str, int] | None:
    """The place and visit in `NAME:COUNT`; None for None. Raises ValueError for any other form."""
    if text is None:
        return None
    name, _, count = text.partition(":")
    if not name or not count.isdecimal() or int(count) < 1:
        raise ValueError(f"{VARIABLE}={text!r}: write NAME:COUNT, as in record.committed:3")
    return name, int(count)


ARMED = parse(os.environ.get(VARIABLE))
"""The place where this process is to die, and at which visit; None in every real run."""
_visits = itertools.count(1)


def reach(name: str) -> None:
    """This process is at the place `name`. Does not return if it is to die here now."""
    if ARMED is None or name != ARMED[0]:
        return
    if next(_visits) == ARMED[1]:
        os.kill(os.getpid(), signal.SIGKILL)
