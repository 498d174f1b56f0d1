"""Stop strings that span a place where the engine interrupted the reply.

An engine looks for stop strings in what one request samples. A continued reply is sampled by
several: the beginning of a stop string at the end of one part is in the prompt of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class StopStrings:
    """The stop strings of one request; `decode` turns ids into text."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self._decode = decode
        self._stops = tuple(stops)
        self.reach = max((len(stop.encode()) for stop in stops), default=0)
        """How many tokens a stop string can span at most: each has at least one byte of text."""

    def across(self, ids: Sequence[int], boundary: int) -> tuple[int, str] | None:
        """(number of ids up to the one that completes it, the stop string) if a stop string begins
        before `boundary` and ends after it; None otherwise.
        """
        first = max(boundary - self.reach, 0)
        before = self._decode(ids[first:boundary])
        for end in range(boundary + 1, min(len(ids), boundary + self.reach) + 1):
            text = self._decode(ids[first:end])
            for stop in self._stops:
                if stop in text and stop not in before:
                    return end, stop
        return None
