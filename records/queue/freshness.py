"""Which turns can still train by the time the trainer would reach them.

A turn trains while at most `max_staleness` versions are newer than its oldest token's. Until its
step more are made: one for each batch that is ready before it, and, if steps go on without live
turns, those made while judge and teacher work.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from records.names import TurnState
from records.queue.round_robin import LIVE_PRIORITY
from records.tables.models import PolicyVersionRow, TurnRow

_PACE_OVER = 8
"""The pace of training is taken from this many latest versions, and the time since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Horizon:
    """The oldest version whose turns can still train, and when it was made, in unix seconds."""

    oldest_version: int
    made_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Untrained:
    """Live turns that may train: those that wait for the judge or are with it, and accepted ones
    that no step has taken.
    """

    judging: int
    accepted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Freshness:
    """How old a turn may be when it trains: `max_staleness` versions; a step takes `batch_size`."""

    max_staleness: int
    batch_size: int


def horizon(
    connection: Connection, freshness: Freshness, latency_s: float | None, now: float
) -> Horizon | None:
    """The horizon of waiting turns: for the next step (`latency_s` None), or after the steps that
    are taken until a turn begun now is ready, `latency_s` from now. None: all can train.

    The newest version's can always: if no step were taken meanwhile, they would.
    """
    newer = freshness.max_staleness
    if latency_s is not None:
        ahead = steps_ahead(connection, freshness, latency_s, now)
        newer = max(newer - ahead, 0)
    row = connection.execute(
        select(PolicyVersionRow.version, PolicyVersionRow.created_at)
        .where(PolicyVersionRow.abandoned.is_(False))
        .order_by(PolicyVersionRow.version.desc())
        .offset(newer)
        .limit(1)
    ).one_or_none()
    return None if row is None else Horizon(oldest_version=row.version, made_at=row.created_at)


def steps_ahead(connection: Connection, freshness: Freshness, latency_s: float, now: float) -> int:
    """The steps to be expected before a turn that is begun now can be in one."""
    most = freshness.batch_size * (freshness.max_staleness + 1)
    ready = sum(_count(connection, one, most) for one in (TurnState.SCORING, TurnState.READY))
    leased = _count(connection, TurnState.LEASED, 1)
    by_batches = leased + ready // freshness.batch_size
    return max(by_batches, round(steps_per_second(connection, now) * latency_s))


def untrained(connection: Connection, most: int) -> Untrained:
    """How many live turns may train, counted up to `most` in each state."""
    return Untrained(
        judging=_count(connection, TurnState.JUDGING, most),
        accepted=_count(connection, TurnState.SCORING, most)
        + _count(connection, TurnState.READY, most),
    )


def _count(connection: Connection, state: TurnState, most: int) -> int:
    """The number of live turns in `state`, counted up to `most`."""
    some = (
        select(TurnRow.turn_id)
        .where(TurnRow.state == state, TurnRow.priority == LIVE_PRIORITY)
        .limit(most)
        .subquery()
    )
    return connection.scalar(select(func.count()).select_from(some)) or 0


def steps_per_second(connection: Connection, now: float) -> float:
    """The pace of the latest steps; it falls while no step is taken."""
    times = connection.scalars(
        select(PolicyVersionRow.created_at)
        .where(PolicyVersionRow.abandoned.is_(False), PolicyVersionRow.version > 0)
        .order_by(PolicyVersionRow.version.desc())
        .limit(_PACE_OVER)
    ).all()
    if len(times) < 2:
        return 0.0
    # A clock of another machine may be ahead of this one.
    return (len(times) - 1) / max(now - times[-1], times[0] - times[-1], 1e-3)
