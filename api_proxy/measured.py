"""What was measured of a hint at a version of the policy, as whoever starts the proxy tells it."""

from __future__ import annotations

from dataclasses import dataclass


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
