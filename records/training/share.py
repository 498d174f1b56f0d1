"""How much of a batch one scope, and each kind of lesson, may fill. Only values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """How much of a batch one scope may fill while others have ready turns.

    A batch that is short because of this limit is filled up with whatever is ready once a turn of
    another scope has been ready for `wait_s`: no scope holds up training.
    """

    most: float = 0.5
    wait_s: float = 60.0

    def of(self, count: int, num_scopes: int) -> int:
        """Maximum turns of one scope in a batch of `count`: at least its equal part; alone, all."""
        if num_scopes == 1:
            return count
        return max(int(self.most * count), -(-count // num_scopes))


UNCAPPED = Share(most=1.0, wait_s=0.0)


class LessonSettings(Protocol):
    """The settings of a trainer that say how many lessons a batch contains."""

    @property
    def lesson_counter_share(self) -> float: ...
    @property
    def lesson_keep_share(self) -> float: ...
    @property
    def lesson_wait_s(self) -> float: ...
    @property
    def hint_wait_s(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LessonShares:
    """How much of a batch are counter- and keep-lessons; the rest is hinted: ready turns first,
    then lessons of hints.

    Missing lessons do not hold up turns: a batch of turns alone is leased if no lesson was made or
    changed for `wait_s`, or if its trainer says by `alone` that it has waited long enough. Without
    `hinted`, the step wins open wishes back: half of it are counter-lessons, if there are any, and
    the other half are keep-lessons. A turn whose hint still
    has to be examined, or practised for the first time, or is resting and has no counter-lessons at
    the moment, stays out of batches for `hold_s` after it became ready: trained without
    counter-lessons, it would cost the open wish for the opposite.
    """

    counter: float = 0.375
    keep: float = 0.25
    wait_s: float = 300.0
    hold_s: float = 600.0
    alone: bool = False
    hinted: bool = True

    @classmethod
    def of_settings(cls, settings: LessonSettings) -> LessonShares:
        """As a trainer's section has them."""
        return cls(
            counter=settings.lesson_counter_share,
            keep=settings.lesson_keep_share,
            wait_s=settings.lesson_wait_s,
            hold_s=settings.hint_wait_s,
        )

    def of(self, count: int, *, has_counter: bool = True, has_keep: bool = True) -> tuple[int, int]:
        """(counter-lessons, keep-lessons) in a batch of `count`; with `hinted`, at least one place
        stays hinted.

        Places of kinds that the run does not have: those of keep-lessons go to counter-lessons,
        those of counter-lessons to the hinted part.
        """
        counter = round(count * self.counter) if has_counter else 0
        keep = round(count * self.keep)
        if not has_keep:
            counter, keep = counter + (keep if has_counter else 0), 0
        if has_counter and not self.hinted:
            counter = max(counter, math.ceil(count / 2)) if has_keep else count
            return counter, count - counter
        counter = min(counter, count - 1)
        return counter, min(keep, count - 1 - counter)
