"""What follows for the next steps when open wishes are done less often than they should be: steps
without a hinted sample, and smaller ones.

One hinted sample of 24 is too much for them: a counter-lesson has a gradient only where an open
wish is lost already, and AdamW takes a step of full size in whatever direction is left.

The rehearsal worker makes lessons by these shares and the trainer fills batches by them: both read
the same row of RUN/rehearsal.jsonl.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from records.training.share import LessonShares
from trainer.rehearsal.estimates import is_obedient
from trainer.rehearsal.journal import VersionRow

_DEEP = 2.0
"""A fall is deep where so many times as much is lost as `rehearsal.obedience_floor` allows. Smaller
ones come by chance: of 64 answers of a policy that lost nothing one in eight.
"""
_REMEMBERED = 8
"""Versions after which a deep fall is forgotten."""
_LEAST_RATE = 0.25


def shares_after(row: VersionRow | None, shares: LessonShares, floor: float) -> LessonShares:
    """The shares of the step after the version that was measured last. `floor`: a share of the
    start's open wishes, see `rehearsal.obedience_floor`.
    """
    is_fallen = row is not None and _is_fallen(row, floor)
    return replace(shares, hinted=False) if is_fallen else shares


def deep_falls(rows: Sequence[VersionRow], floor: float) -> int:
    """How many of the last versions lost many open wishes; `rows` from the oldest to the newest."""
    least = 1.0 - _DEEP * (1.0 - floor)
    return sum(_is_fallen(row, least) for row in rows[-_REMEMBERED:])


def rate_after(row: VersionRow | None, floor: float) -> float:
    """By what the learning rate is multiplied after the version that was measured last: halved for
    each deep fall that is remembered. Steps went too far. One that wins open wishes back is a whole
    one: in half of it they stay lost for another version.
    """
    if row is None or _is_fallen(row, floor):
        return 1.0
    return max(0.5**row.deep_falls, _LEAST_RATE)


def _is_fallen(row: VersionRow, floor: float) -> bool:
    """Whether a version lost open wishes. Version 0 is the start: it falls short by chance alone,
    and its counter-lessons have no gradient but rounding errors.
    """
    if row.version == 0 or row.obedience is None:
        return False
    return not is_obedient(row.obedience.obedience(), floor)
