"""The rehearsal worker of a run, from the run's configuration and connections."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from judge.hints.said import SourceCheck
from opd.rehearsal.desk import Desk
from opd.rehearsal.heartbeat import Heartbeat
from opd.rehearsal.needs import Questions
from opd.rehearsal.policy_sampler import PolicySampler
from opd.rehearsal.preparing.effect import fall_at, part_of_words
from opd.rehearsal.seats import Seats
from opd.rehearsal.worker import RehearsalWorker
from opd.run.config import RunConfig
from records.store import Store
from rollout_bridge.config import ScoringConfig
from rollout_bridge.embedded.config import spare_rows
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.types import SPARE_PRIORITY
from rollout_bridge.rendering.rendering import Rendering
from rollout_bridge.scoring.policy_scores import OwnScores, served_version
from rollout_bridge.scoring.teachers import FrozenTeacher

_PLACES = 64
"""Places of an engine that the run did not start."""
_MEASURED_AT = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Connections:
    """What the worker talks to; `frozen` serves the start weights."""

    store: Store
    questions: Questions
    policy: EngineClient
    frozen: EngineClient
    rendering: Rendering


def rehearsal_worker(
    config: RunConfig, to: Connections, *, folder: Path, owner: str
) -> RehearsalWorker:
    """Create it; the caller keeps the connections open. `folder` is the run's."""
    settings, scoring = config.rehearsal, config.scoring
    # A teacher in the trainer scores all samples itself; it would teach the start's answers where
    # the policy's own are to be held.
    own = None if config.trainer.teacher.in_trainer else OwnScores(to.policy, scoring.top_k)
    seats = seats_of(config)
    sampler = partial(
        _sampler,
        rendering=to.rendering,
        max_new_tokens=settings.max_new_tokens,
        context_length=scoring.context_length,
        pause_mode=config.trainer.pause_mode,
        proxy=config.proxy,
        seats=seats,
        on_answer=Heartbeat(folder),
    )
    return RehearsalWorker(
        to.store,
        to.questions,
        desk_of(scoring, to, own),
        policy=sampler(to.policy, temperature=settings.temperature),
        probe=sampler(to.policy, temperature=_MEASURED_AT),
        start=sampler(to.frozen, temperature=_MEASURED_AT),
        version=partial(served_version, to.policy),
        config=settings,
        shares=config.trainer.lesson_shares,
        batch_size=config.trainer.rollout_batch_size,
        folder=folder,
        owner=owner,
        concurrency=seats.total,
    )


def source_check(config: RunConfig, to: Connections) -> SourceCheck | None:
    """What a hint must do where it came from; None if nothing is required."""
    least = config.scoring.least_fall
    if not least:
        return None
    desk = desk_of(config.scoring, to)
    return SourceCheck(
        fall=partial(fall_at, desk), least=least, part_of_words=partial(part_of_words, desk)
    )


def desk_of(scoring: ScoringConfig, to: Connections, own: OwnScores | None = None) -> Desk:
    """A desk whose teacher is the frozen start model; `own` lets the policy be one, too."""
    teacher = FrozenTeacher(
        scoring.teacher,
        to.frozen,
        expected_version=scoring.expected_version,
        context_length=scoring.context_length,
        top_k=scoring.top_k,
    )
    return Desk(to.rendering, teacher, own)


def _sampler(engine: EngineClient, **settings: Any) -> PolicySampler:
    return PolicySampler(engine, spare=engine.at(SPARE_PRIORITY), **settings)


def seats_of(config: RunConfig) -> Seats:
    """Answers in progress at a time: `rehearsal.share` of the engine's places, which start before
    waiting requests (FIRST_PRIORITY), so traffic of any size leaves them these, and of an engine
    of the run's own also what nothing else uses of three quarters (SPARE_PRIORITY).
    """
    engine = config.policy
    is_own = engine.url is None and engine.embedded is not None
    places = engine.embedded.max_batch if is_own and engine.embedded else _PLACES
    own = max(round(config.rehearsal.share * places), 1)
    return Seats(own, max(spare_rows(0, places) - own, 0) if is_own else 0)
