"""What was measured in a run, as whoever starts the proxy provides it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class HintVersion:
    """Gaps are nats per token with a 95% interval; of open wishes against the hint, `followed` of
    `asked` answers did what they ask. None: not measured at this version.
    """

    version: int
    gap: float | None
    gap_low: float | None
    gap_high: float | None
    followed: int | None
    asked: int | None


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
