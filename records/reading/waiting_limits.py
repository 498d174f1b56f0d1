"""What a run's configuration sets for waiting, which explanations of turns need to know."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingLimits:
    """For how much, and how long, a turn waits."""

    batch_size: int | None
    """None: not known here."""
    idle_timeout_s: float
    hint_wait_s: float | None
    """None: hints are not rehearsed, and no turn waits for its hint."""
    outcome_wait_s: float | None = None
    """None: rewards do not use outcomes, and no turn waits for its session's."""
