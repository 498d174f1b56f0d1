"""The rehearsal worker of a run, from the run's configuration and connections."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from judge.hints.examiner import SourceCheck
from opd.rehearsal.desk import Desk
from opd.rehearsal.heartbeat import Heartbeat
from opd.rehearsal.needs import Questions
from opd.rehearsal.policy_sampler import PolicySampler
from opd.rehearsal.preparing.effect import fall_at, part_of_words
from opd.rehearsal.worker import RehearsalWorker
from opd.run.config import RunConfig
from records.store import Store
from rollout_bridge.config import ScoringConfig
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.rendering.rendering import Rendering
from rollout_bridge.scoring.policy_scores import served_version
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
    concurrency = concurrency_of(config)
    sampler = partial(
        PolicySampler,
        rendering=to.rendering,
        max_new_tokens=settings.max_new_tokens,
        context_length=scoring.context_length,
        pause_mode=config.trainer.pause_mode,
        proxy=config.proxy,
        places=asyncio.Semaphore(concurrency),
        on_answer=Heartbeat(folder),
    )
    return RehearsalWorker(
        to.store,
        to.questions,
        _desk(scoring, to),
        policy=sampler(to.policy, temperature=settings.temperature),
        probe=sampler(to.policy, temperature=_MEASURED_AT),
        start=sampler(to.frozen, temperature=_MEASURED_AT),
        version=partial(served_version, to.policy),
        config=settings,
        shares=config.trainer.lesson_shares,
        batch_size=config.trainer.rollout_batch_size,
        folder=folder,
        owner=owner,
        concurrency=concurrency,
    )


def source_check(config: RunConfig, to: Connections) -> SourceCheck | None:
    """What a hint must do where it came from; None if nothing is required."""
    least = config.scoring.least_fall
    if not least:
        return None
    desk = _desk(config.scoring, to)
    return SourceCheck(
        fall=partial(fall_at, desk), least=least, part_of_words=partial(part_of_words, desk)
    )


def _desk(scoring: ScoringConfig, to: Connections) -> Desk:
    teacher = FrozenTeacher(
        scoring.teacher,
        to.frozen,
        expected_version=scoring.expected_version,
        context_length=scoring.context_length,
        top_k=scoring.top_k,
    )
    return Desk(to.rendering, teacher)


def concurrency_of(config: RunConfig) -> int:
    """Answers in progress at a time. They start before waiting requests (LESSON_PRIORITY), so
    traffic of any size leaves them these places of the engine, and they never take more.
    """
    engine = config.policy
    is_own = engine.url is None and engine.embedded is not None
    places = engine.embedded.max_batch if is_own and engine.embedded else _PLACES
    return max(round(config.rehearsal.share * places), 1)
