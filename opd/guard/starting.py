"""Creates the guard of a run from its configuration and its connections."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from opd.guard.asking import Asker
from opd.guard.canaries import read_canaries
from opd.guard.gap import GapMeasurer, TaughtTurn
from opd.guard.metrics import GuardMetrics
from opd.guard.worker import GuardWorker
from opd.rehearsal.policy_sampler import PolicySampler
from opd.rehearsal.seats import Seats
from opd.rehearsal.starting import Connections, desk_of, seats_of
from opd.run.config import RunConfig
from records.store import Store
from records.types import TurnRecord
from rollout_bridge.engine.served import StagedFirst
from rollout_bridge.scoring.policy_scores import served_version


def guard_worker(
    config: RunConfig, to: Connections, *, folder: Path, metrics: GuardMetrics
) -> GuardWorker:
    """Create it; the caller keeps the connections open. It asks for the staged version of the run
    in `folder`, if there is one. Raises StartupError for bad canaries.
    """
    assert config.guard.canaries is not None
    sampler = partial(
        PolicySampler,
        rendering=to.rendering,
        temperature=1.0,
        max_new_tokens=config.guard.max_new_tokens,
        context_length=config.scoring.context_length,
        pause_mode=config.trainer.pause_mode,
        proxy=config.proxy,
        seats=Seats(seats_of(config).own),
    )
    asker = Asker(
        canaries=read_canaries(config.guard.canaries),
        rendering=to.rendering,
        start=to.frozen,
        judge=to.questions,
        timeout_s=config.guard.check_timeout_s,
    )
    to_check = to.policy.naming(StagedFirst(folder))
    policy, start = sampler(to_check), sampler(to.frozen)
    return GuardWorker(
        asker,
        config.guard,
        policy=policy,
        start=start,
        version=partial(served_version, to_check),
        states=partial(_newest_states, to.store, config.guard.states),
        scores=to_check,
        gap=GapMeasurer(desk_of(config.scoring, to), policy, start),
        records=_Records(to.store, config.scoring.teacher),
        folder=folder,
        metrics=metrics,
    )


@dataclass(frozen=True, slots=True)
class _Records:
    """The guard's questions to a store; `teacher` is the start model's name in it."""

    store: Store
    teacher: str

    async def versions_given_up(self) -> Set[int]:
        return await self.store.versions_given_up()

    async def taught_turns(self, most: int) -> Sequence[TaughtTurn]:
        hints = await self.store.newest_taught(self.teacher, limit=most)
        turns = await self.store.load_turns(list(hints))
        return [TaughtTurn(turn=one, hint=hints[one.turn_id]) for one in turns]


async def _newest_states(store: Store, most: int) -> list[TurnRecord]:
    if not most:
        return []
    return await store.load_turns(await store.keep_states(exclude_hints=(), limit=most))
