"""Places where a process kills itself, for the crash test alone (docs/reliability.md).

A process started with `OPD_FAIL_POINT=NAME:COUNT` in its environment ends by SIGKILL when it comes
to the place NAME for the COUNTth time: nothing is flushed, closed or given back, as in a real
crash, but at an instant that chance would hardly ever meet. It is no setting of a run: it concerns
one start of one process. Unset, a place costs one comparison.
"""

from __future__ import annotations

import itertools
import os
import signal

VARIABLE = "OPD_FAIL_POINT"


def parse(text: str | None) -> tuple[str, int] | None:
    """A place and a visit of `NAME:COUNT`; None for None. Raises ValueError for another form."""
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
