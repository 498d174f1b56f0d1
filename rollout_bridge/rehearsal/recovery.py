"""What happens to the next steps when open wishes are followed too rarely: steps without a hinted
sample, and smaller steps.

Even one hinted sample in 24 damages open wishes: a counter-lesson has a gradient only where an open
wish is already lost, and AdamW takes a step of full size in whatever direction is left. For the
same reason, counter-lessons alone would undo what the hint taught. So half of the keep-lessons of
such a step are for states of the hints, and the policy, as it is, is their teacher: they have no
gradient until a pass has changed what it does there.

The rehearsal worker makes lessons by these shares and the trainer fills batches by them: both read
the same row of RUN/rehearsal.jsonl.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from records.training.share import LessonShares
from rollout_bridge.rehearsal.estimates import is_obedient
from rollout_bridge.rehearsal.journal import VersionRow

_DEEP = 2.0
"""A fall is deep if this many times as much is lost as `rehearsal.obedience_floor` allows. One step
wins a smaller one back.
"""
_REMEMBERED = 8
"""Versions after which a deep fall is forgotten."""
_LEAST_RATE = 0.25


def shares_after(row: VersionRow | None, shares: LessonShares, floor: float) -> LessonShares:
    """The shares of the step after the last measured version. `floor`: a share of the start's open
    wishes, see `rehearsal.obedience_floor`.
    """
    is_fallen = row is not None and _is_fallen(row, floor)
    return replace(shares, hinted=False) if is_fallen else shares


def deep_falls(rows: Sequence[VersionRow], floor: float) -> int:
    """How many of the last versions lost many open wishes; `rows` from the oldest to the newest."""
    least = 1.0 - _DEEP * (1.0 - floor)
    return sum(_is_fallen(row, least) for row in rows[-_REMEMBERED:])


def rate_after(row: VersionRow | None, floor: float) -> float:
    """The factor of the learning rate after the last measured version: halved for each remembered
    deep fall, because steps went too far. A step that wins open wishes back is a full one: with
    half a step they stay lost for another version.
    """
    if row is None or _is_fallen(row, floor):
        return 1.0
    return max(0.5**row.deep_falls, _LEAST_RATE)


def _is_fallen(row: VersionRow, floor: float) -> bool:
    """Whether a version lost open wishes. The start falls short only by chance, and its
    counter-lessons have no gradient except rounding errors.
    """
    if row.has_start_weights or row.obedience is None:
        return False
    return not is_obedient(row.obedience.obedience(), floor)
