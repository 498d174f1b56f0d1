"""What was probably meant by a name that is not in the records."""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterable

from records.care.housekeeping import Housekeeping
from records.store import Store

_NAMES_SHOWN = 3


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """The end of a message: the nearest of the known names, or nothing if none is near."""
    near = difflib.get_close_matches(given, known, n=_NAMES_SHOWN)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


async def near_sessions(store: Store, given: str) -> str:
    """`did_you_mean` among the newest sessions; nothing if one has exactly this name."""
    known = await Housekeeping(store, time.time).session_names()
    return "" if given in known else did_you_mean(given, known)
