"""Whether a hint is practised further: pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from records.hints.types import Hint, HintStatus
from rollout_bridge.rehearsal.config import RehearsalConfig
from rollout_bridge.rehearsal.estimates import Gap, PooledObedience, Uptake

NOTHING = 1e-3
"""Nats per token; a first gap this small has nothing to teach, and a tenth of it cannot be
measured.
"""
PLATEAU = 5
"""Versions before this one, over which a gap that no longer falls has changed by at most
`rehearsal.rest_at` of the first one.
"""
_LEFT = 0.75
"""Share of the first gap that may be left on a plateau. One of two held-back states may be one
where the hint does not matter, or where the policy does what the hint asks in other words than the
teacher: no step closes that. If more is left, the hint is not learned.
"""
_MOST_OF_THE_WAY = 0.8
"""A hint that is not taken up this far is practised on, though its gap seems to have stopped: a gap
says little of a wish that is decided at its first tokens.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """Another status for a hint, and why."""

    status: HintStatus
    detail: str


def closed_below(first_gap: float, config: RehearsalConfig) -> float:
    """The gap, in nats per token, at which a hint is learned."""
    return max(config.rest_at * first_gap, NOTHING)


def fate_of(
    hint: Hint,
    gap: Gap | None,
    first_gap: float | None,
    active_from: int,
    config: RehearsalConfig,
    obedience: PooledObedience | None = None,
    *,
    version_obeys: bool = True,
    earlier: Sequence[float] = (),
    rested_at: float | None = None,
    uptake: Uptake | None = None,
) -> Fate | None:
    """What a measurement means for a hint; None: it stays what it is. `active_from` is its number
    of steps when it last became active. A hint whose gap has closed is still practised while open
    wishes against it (`obedience`; None: too few answers), or all of them at this version, are done
    too seldom. A resting one wakes when those against it are: then its counter-lessons teach.
    `earlier`: its gaps at earlier versions, since it was last active; `rested_at`: its gap when it
    came to rest; `uptake`: at the last versions together; None: unknown.
    """
    obeys = version_obeys and (obedience is None or obedience.rate.value >= obedience.floor)
    bound = None if first_gap is None else closed_below(first_gap, config)
    if gap is not None and bound is not None:
        if hint.status is not HintStatus.RESTING and gap.high <= bound and obeys:
            return Fate(
                status=HintStatus.RESTING,
                detail=f"its gap is {gap.value:.3g} (up to {gap.high:.3g}) nats of {first_gap:.3g}",
            )
        if (
            hint.status is HintStatus.ACTIVE
            and obeys
            and _falls_no_more(gap, earlier, first_gap, config)
            and not _has_far_to_go(uptake)
        ):
            return Fate(
                status=HintStatus.RESTING,
                detail=f"its gap has stopped at {gap.value:.3g} nats of {first_gap:.3g}: further "
                "steps do not close it",
            )
        opened = config.wake_factor * bound
        if rested_at is not None:
            opened = max(opened, rested_at + bound)
        if hint.status is HintStatus.RESTING and gap.value > opened:
            return Fate(
                status=HintStatus.ACTIVE,
                detail=f"its gap has opened to {gap.value:.3g} nats of {first_gap:.3g}",
            )
    if hint.status is HintStatus.RESTING and obedience is not None and not obedience.passed:
        return Fate(
            status=HintStatus.ACTIVE,
            detail=f"open wishes against it are done in {obedience.rate.value:.2f} of "
            f"{obedience.rate.count} answers, of {obedience.before:.2f} before",
        )
    steps = hint.num_steps - active_from
    if hint.status is HintStatus.ACTIVE and steps >= config.max_steps:
        said = "not measured" if gap is None else f"{gap.value:.3g} nats"
        return Fate(
            status=HintStatus.STUCK,
            detail=f"{steps} steps have not closed its gap ({said}); rehearsal.max_steps",
        )
    return None


def _has_far_to_go(uptake: Uptake | None) -> bool:
    """Whether what the hint asks is not done as often yet as the start does it with the hint."""
    return uptake is not None and uptake.is_known and uptake.share < _MOST_OF_THE_WAY


def _falls_no_more(
    gap: Gap, earlier: Sequence[float], first_gap: float | None, config: RehearsalConfig
) -> bool:
    """Whether some of the first gap has closed, and the last steps changed nothing."""
    if first_gap is None or len(earlier) < PLATEAU:
        return False
    last = [*earlier[-PLATEAU:], gap.value]
    is_flat = max(last) - min(last) <= closed_below(first_gap, config)
    return is_flat and gap.value <= _LEFT * first_gap
