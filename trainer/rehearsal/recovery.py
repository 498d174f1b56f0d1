"""Steps without a hinted sample while open wishes are done less often than they should be.

One hinted sample of 24 is too much for them: a counter-lesson has a gradient only where an open
wish is lost already, and AdamW takes a step of full size in whatever direction is left.

The rehearsal worker makes lessons by these shares and the trainer fills batches by them: both read
the same row of RUN/rehearsal.jsonl.
"""

from __future__ import annotations

from dataclasses import replace

from records.training.share import LessonShares
from trainer.rehearsal.estimates import is_obedient
from trainer.rehearsal.journal import VersionRow


def shares_after(row: VersionRow | None, shares: LessonShares, floor: float) -> LessonShares:
    """The shares of the step after the version that was measured last. `floor`: a share of the
    start's open wishes, see `rehearsal.obedience_floor`. Version 0 is the start: it falls short by
    chance alone, and its counter-lessons have no gradient but rounding errors.
    """
    if row is None or row.version == 0 or row.obedience is None:
        return shares
    if is_obedient(row.obedience.obedience(), floor):
        return shares
    return replace(shares, hinted=False)
