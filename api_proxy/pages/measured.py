"""What was measured in a run, as whoever starts the proxy provides it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

Hits = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class HintVersion:
    """Gaps are nats per token with a 95% interval; the other figures are (hits, answers). `done`:
    answers that do what the hint asks, unasked; `done_start` and `done_hinted`: those of the start
    model, without and with the hint; `obeyed`: answers to open wishes against the hint that do what
    these ask. None: not measured at this version.
    """

    version: int
    gap: float | None
    gap_low: float | None
    gap_high: float | None
    obeyed: Hits | None
    done: Hits | None
    done_start: Hits | None
    done_hinted: Hits | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One plot: a title, the unit of its y axis and named series over the x values `steps`.

    `marks` are labelled horizontal lines: a value to compare with, or a bound of what is healthy.
    `says`: what it shows, and what is healthy.
    """

    title: str
    unit: str
    steps: Sequence[float]
    series: Mapping[str, Sequence[float | None]]
    step_unit: str = "update"
    marks: Mapping[str, float] = field(default_factory=dict)
    says: str = ""


class Curves(Protocol):
    """What was measured step by step; all of it is read from files, so call it in a thread."""

    def own(self) -> list[Curve]:
        """Of the run that this endpoint serves."""
        ...

    def others(self) -> list[str]:
        """Names of other runs that can be laid over it, newest first."""
        ...

    def of(self, name: str) -> list[Curve]:
        """Of another run. Raises KeyError for a name that is not among `others`."""
        ...
