"""Locates a span of a fresh render in the ids that a turn was actually sampled under.

The two sequences show the same messages. But for an assistant's message the stored one contains
what was sampled, and the fresh one what the template makes of it. Everything between must be equal
and in order. Pure functions on id arrays [P]; the caller knows which message a span belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np

from records.types import Ids


class AlignmentError(ValueError):
    """The stored ids differ from the fresh ids in more than replies, or the place is ambiguous."""


def locate_span(
    fresh: Ids,
    free: np.ndarray,
    stored: Ids,
    span: tuple[int, int],
    is_tail: Callable[[Ids], bool],
) -> int:
    """Start in `stored` [P'] of the ids fresh[span[0]:span[1]], none of which is free.

    `free` [P] marks ids of `fresh` that `stored` may have replaced by anything. The runs of other
    ids must occur in `stored` in order: the first at its start, the last at its end, except for a
    tail that `is_tail` accepts (it must refuse whatever ends with a refused tail). Raises
    AlignmentError unless exactly one place is possible.
    """
    runs = _runs(~free)
    target = next(i for i, (low, high) in enumerate(runs) if low <= span[0] and span[1] <= high)
    pieces = [fresh[low:high] for low, high in runs]
    low = _earliest_end(pieces[:target], stored)
    high = _latest_start(pieces[target + 1 :], stored, is_tail)
    places = list(_places(pieces[target], stored, low, high))
    if target == 0:
        places = [place for place in places if place == 0]
    if target == len(pieces) - 1:
        places = [place for place in places if is_tail(stored[place + len(pieces[target]) :])]
    if len(places) != 1:
        raise AlignmentError(f"the span fits the stored prompt in {len(places)} places")
    return places[0] + span[0] - runs[target][0]


def _runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """Half-open spans of consecutive True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return [(int(low), int(high)) for low, high in edges.reshape(-1, 2)]


def _earliest_end(pieces: list[Ids], stored: Ids) -> int:
    """End of the last piece if all are placed in order, as early as possible, the first at 0."""
    position = 0
    for index, piece in enumerate(pieces):
        high = len(piece) if index == 0 else len(stored)
        place = next(_places(piece, stored, position, high), None)
        if place is None:
            raise AlignmentError("the stored prompt does not show the turn's messages in order")
        position = place + len(piece)
    return position


def _latest_start(pieces: list[Ids], stored: Ids, is_tail: Callable[[Ids], bool]) -> int:
    """Start of the first piece if all are placed in order, as late as possible, the last one at the
    end (except for a tail that `is_tail` accepts).
    """
    position = len(stored)
    for index, piece in enumerate(reversed(pieces)):
        places = _places(piece, stored, 0, position, backwards=True)
        if index == 0:
            # Earlier places have longer tails: if the last one is refused, all are.
            places = (p for p in list(islice(places, 1)) if is_tail(stored[p + len(piece) :]))
        place = next(iter(places), None)
        if place is None:
            raise AlignmentError("the stored prompt does not show the turn's messages in order")
        position = place
    return position


def _places(
    piece: Ids, stored: Ids, low: int, high: int, *, backwards: bool = False
) -> Iterator[int]:
    """Every index in stored[low:high] at which the whole piece occurs, in order."""
    size = stored.itemsize
    needle = piece.astype(stored.dtype).tobytes()
    view = stored[low:high].tobytes()
    start, end = 0, len(view)
    while True:
        found = view.rfind(needle, 0, end) if backwards else view.find(needle, start)
        if found < 0:
            return
        # Bytes may match across the border of two ids; such a match does not count.
        if found % size == 0:
            yield low + found // size
        start, end = found + 1, found + len(needle) - 1
