"""The rehearsal worker: practises active hints, measures each version, and stops training that goes
wrong.

    sampling loop    lessons in `sampling` -> the policy answers -> `scoring`
    scoring loop     lessons in `scoring` -> the frozen teacher reads -> `ready`
    director         what is there to do now (below)

The director looks at the version that the policy's engine serves. A new one is measured before it
gets lessons: gaps, obedience, states of other kinds; hints rest, wake or are given up; training is
stopped if obedience fell. Then it adds as many lessons as the next step needs: only keep-lessons if
no hint is practised, but what an ended one taught is not undone yet. In parallel, one hint at a
time is prepared, and states of other kinds are chosen. All that matters is in the store and in
RUN/rehearsal.jsonl: the process may die at any instruction. It waits for engines or a judge that
are down.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from opd.rehearsal.desk import Desk
from opd.rehearsal.losses import TextLosses
from opd.rehearsal.measuring.measuring import Measurer
from opd.rehearsal.measuring.review import Review
from opd.rehearsal.needs import Questions, RehearsalStore
from opd.rehearsal.planning import (
    KeptState,
    Rehearsed,
    Rota,
    missing,
    taking_part,
    targets_of,
    targets_of_return,
)
from opd.rehearsal.policy_sampler import PolicySampler
from opd.rehearsal.preparing.keeping import Keeping
from opd.rehearsal.preparing.preparing import HintPreparation, PreparedHint
from opd.rehearsal.stages import LessonClaims, SamplingStage, ScoringStage
from records.errors import StoreUnavailable
from records.hints.types import Hint, HintStatus, RehearsalBlock
from records.lessons.names import LessonDrop, LessonKind, LessonState
from records.lessons.types import NewLesson
from records.training.share import LessonShares
from rollout_bridge.engine.errors import EngineError
from rollout_bridge.rehearsal.config import RehearsalConfig
from rollout_bridge.rehearsal.journal import Journal, VersionRow
from rollout_bridge.rehearsal.recovery import shares_after
from rollout_bridge.stop_order import order_stop, read_stop
from rollout_bridge.worker import ClaimLoop, ServiceUnavailable

logger = logging.getLogger(__name__)

_MOST_HINTS = 256
_MAY_BE_PRACTISED = (None, RehearsalBlock.NO_STATES, RehearsalBlock.NO_COUNTER_LESSONS)
"""With these blocks, a hint is examined again: there may be new states."""
_LONGEST_PAUSE_S = 30.0
_TRIES = 4
"""Most lessons of one kind per minute and version, as a multiple of those kept ready: if all are
dropped, more of them would be dropped too.
"""
_TRY_AGAIN_S = 60.0


class RehearsalWorker:
    """Rehearses until stopped.

    `policy` samples lessons; `probe` (the same engine) and `start` (the frozen one) sample at
    temperature 1. `version` asks the policy's engine which version it serves. `concurrency`:
    answers in progress at a time.
    """

    def __init__(
        self,
        store: RehearsalStore,
        questions: Questions,
        desk: Desk,
        *,
        policy: PolicySampler,
        probe: PolicySampler,
        start: PolicySampler,
        version: Callable[[], Awaitable[int]],
        config: RehearsalConfig,
        shares: LessonShares,
        batch_size: int,
        folder: Path,
        owner: str,
        concurrency: int,
    ) -> None:
        self._store, self._version, self._config = store, version, config
        self._shares, self._batch_size, self._folder = shares, batch_size, folder
        self._desk = desk
        limit = asyncio.Semaphore(concurrency)
        self._preparation = HintPreparation(store, questions, desk, start, config, limit)
        self._keeping = Keeping(store, self._preparation, config)
        measurer = Measurer(desk, probe, start, questions, limit)
        self._review = Review(store, measurer, self._keeping, Journal(folder), config)
        self._hints: list[Hint] = []
        losses = TextLosses()
        self._rota = Rota(losses, random.randrange(1_000_000))
        claims = LessonClaims(store)
        loop = config.loop.model_copy(update={"concurrency": concurrency})
        self.sampling = SamplingStage(store, policy, desk, f"{owner}:sampling")
        self.scoring = ScoringStage(store, desk, losses, f"{owner}:scoring")
        self._loops = [
            ClaimLoop(claims, self.sampling, owner=f"{owner}:sampling", config=loop),
            ClaimLoop(claims, self.scoring, owner=f"{owner}:scoring", config=loop),
        ]
        self._prepared: dict[str, PreparedHint] = {}
        self._looked_at: dict[str, float] = {}
        self._came_to: set[str] = set()
        """Hints that were prepared, or could not be practised, since this process began."""
        self._preparing: asyncio.Task[None] | None = None
        self._at: int | None = None
        self._choosing: asyncio.Task[None] | None = None
        self._made: dict[LessonKind, int] = {}
        self._counting_since = 0.0
        self._warned: set[LessonKind] = set()
        self._failures = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set. Raises TeacherChanged; see also `ClaimLoop.run`."""
        async with asyncio.TaskGroup() as group:
            for loop in self._loops:
                group.create_task(loop.run(stop))
            group.create_task(self._direct(stop))

    async def _direct(self, stop: asyncio.Event) -> None:
        stopping = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set():
                look = asyncio.create_task(self._look())
                await asyncio.wait([look, stopping], return_when=asyncio.FIRST_COMPLETED)
                if not look.done():
                    look.cancel()
                    await asyncio.gather(look, return_exceptions=True)
                    return
                await asyncio.wait([stopping], timeout=look.result())
        finally:
            stopping.cancel()
            beside = [one for one in (self._preparing, self._choosing) if one is not None]
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)

    async def _look(self) -> float:
        """Do what is due now; returns the seconds until the next look."""
        try:
            await self.direct()
        except (ServiceUnavailable, StoreUnavailable, EngineError) as error:
            self._failures += 1
            pause_s = min(self._config.poll_s * 2.0 ** min(self._failures, 30), _LONGEST_PAUSE_S)
            logger.warning("rehearsal waits %.1f s: %s", pause_s, error)
            return pause_s
        self._failures = 0
        return self._config.poll_s

    async def direct(self) -> None:
        """One look. Raises ServiceUnavailable, StoreUnavailable, EngineError; the next look
        continues where this one ended.
        """
        if read_stop(self._folder) is not None:
            return
        version = await self._version()
        await self._follow(version)
        if dropped := await self._store.drop_unguarded():
            logger.info("%d turns of hints that nothing guards do not train", dropped)
        self._prepare_next()
        hints = list(self._prepared.values())
        ended = await self._keeping.to_bring_back(self._review.returned)
        if not hints and (not ended or not self._knows_hints):
            return
        self._choose_states(hints, ended)
        if not self._keeping.has_tried:
            return
        kept = await self._keeping.states(hints)
        last = self._review.last()
        # A failed version without an order to stop: somebody removed the order, to try again.
        if last is None or last.version != version or last.failure is not None:
            if not self._has_all_of(last):
                return
            # Before its row is written: whoever dies in between finds the version unmeasured.
            if dropped := await self._store.drop_held_lessons():
                logger.info("%d lessons that held an earlier version are dropped", dropped)
            row = await self._review.version(version, hints, kept, ended)
            ended = await self._keeping.to_bring_back(self._review.returned)
            order = self._review.stop_order(row)
            if order is not None:
                logger.error("training stops: %s", order.reason)
                order_stop(self._folder, order)
                return
            await self._follow(version)
        for one in list(self._prepared.values()):
            if one.hint.first_gap is None:  # ready since this version was measured
                await self._measure_first(one, version)
        await self._follow(version)
        of_ended = self._keeping.ended(ended, hints).values()
        to_return = [turn_id for turn_ids in of_ended for turn_id in turn_ids]
        await self._add_lessons([turn.turn_id for turn in kept], to_return)

    async def _follow(self, version: int) -> None:
        """Read what became of the hints, and expire what a new version makes stale."""
        known = await self._store.active_hints(_MOST_HINTS)
        hints = {one.hint_id: one for one in known if one.block in _MAY_BE_PRACTISED}
        self._hints = list(hints.values())
        # A hint that returns after another examination is prepared at once.
        self._looked_at = {key: at for key, at in self._looked_at.items() if key in hints}
        self._came_to &= hints.keys()
        if version != self._at:
            expired = await self._store.expire_lessons(oldest_allowed=version)
            logger.info("version %d: %d lessons of older ones expired", version, expired)
            for key in self._prepared.keys() & hints.keys():
                self._prepared[key] = await self._preparation.load(hints[key])
            self._at, self._made = version, {}
            self._warned.clear()
        for key, one in list(self._prepared.items()):
            if key in hints:
                self._prepared[key] = replace(one, hint=hints[key])
            else:
                del self._prepared[key]
                await self._store.drop_lessons_of(key, LessonDrop.HINT_ENDED)

    def _has_all_of(self, last: VersionRow | None) -> bool:
        """Whether the hints that were measured last are prepared in this process: otherwise a
        version would be judged by only some of them.
        """
        if last is None:
            return True
        measured = {*last.obedience_of, *(one.hint_id for one in last.hints)}
        return all(one.hint_id in self._came_to for one in self._hints if one.hint_id in measured)

    @property
    def _knows_hints(self) -> bool:
        """Whether each hint that may be practised has been examined since this process began."""
        is_known = all(one.hint_id in self._looked_at for one in self._hints)
        return is_known and self._preparing is None

    def _choose_states(self, hints: list[PreparedHint], ended: list[Hint]) -> None:
        """In parallel to everything else, choose the states that are kept."""
        if self._choosing is not None and self._choosing.done():
            task, self._choosing = self._choosing, None
            task.result()
        if self._choosing is None and self._keeping.is_due(hints, ended):
            self._choosing = asyncio.create_task(self._choose(hints, ended))

    async def _choose(self, hints: list[PreparedHint], ended: list[Hint]) -> None:
        try:
            await self._keeping.choose(hints, ended)
        except (ServiceUnavailable, StoreUnavailable, EngineError) as error:
            logger.warning("states of other kinds are not chosen yet: %s", error)

    def _prepare_next(self) -> None:
        """In parallel to everything else, prepare the hint that has waited longest."""
        if self._preparing is not None and self._preparing.done():
            task, self._preparing = self._preparing, None
            task.result()
        active = [one for one in self._hints if self._wants_preparation(one)]
        if self._preparing is not None or not active:
            return
        hint = min(active, key=lambda one: self._looked_at.get(one.hint_id, 0.0))
        if time.monotonic() - self._looked_at.get(hint.hint_id, -1e9) < self._config.states_every_s:
            return
        self._looked_at[hint.hint_id] = time.monotonic()
        self._preparing = asyncio.create_task(self._prepare(hint))

    def _wants_preparation(self, hint: Hint) -> bool:
        """A practised hint is prepared repeatedly: new states come, and users' words rule out
        others.
        """
        return hint.status is HintStatus.ACTIVE or hint.hint_id not in self._prepared

    async def _prepare(self, hint: Hint) -> None:
        try:
            prepared = await self._preparation.prepare(hint)
        except (ServiceUnavailable, StoreUnavailable, EngineError) as error:
            logger.warning("hint %s is not prepared yet: %s", hint.hint_id, error)
            if hint.hint_id in self._looked_at:
                self._looked_at[hint.hint_id] -= self._config.states_every_s - self._config.poll_s
            return
        self._came_to.add(hint.hint_id)
        if prepared is None:
            self._prepared.pop(hint.hint_id, None)
        else:
            self._prepared[hint.hint_id] = prepared

    async def _measure_first(self, one: PreparedHint, version: int) -> None:
        row = await self._review.hint(one, version)
        if row.gap is None:
            detail = "no answer at its states could be measured"
            await self._store.set_hint_block(one.hint.hint_id, RehearsalBlock.NO_STATES, detail)
            self._prepared.pop(one.hint.hint_id, None)

    async def _add_lessons(self, kept: list[str], to_return: list[str]) -> None:
        """As many as the next step lacks, unless a step is running: it makes a version for which
        lessons of this one are too old. `kept` are turns of states of other kinds, `to_return`
        those of ended hints.
        """
        counts = await self._store.lesson_counts()
        if any(state is LessonState.LEASED and number for (_, state), number in counts.items()):
            return
        to_keep = [*to_return, *(one for one in kept if one not in to_return)]
        disobeyed = self._review.disobeyed(self._prepared)
        of_turns = await self._store.hints_of_ready_turns()
        measured = [
            Rehearsed(
                hint=one.hint,
                states=tuple(turn.turn_id for turn in one.training),
                prompts=tuple(prompt.prompt_id for prompt in one.prompts),
                is_disobeyed=one.hint.hint_id in disobeyed,
            )
            for one in self._prepared.values()
            if one.hint.first_gap is not None
        ]
        practised = taking_part(measured, of_turns)
        active = [one for one in practised if one.hint.status is HintStatus.ACTIVE]
        has_prompts = any(one.prompts for one in practised)
        shares = shares_after(self._review.last(), self._shares, self._config.obedience_floor)
        may_hold = self._desk.knows_policy and not shares.hinted
        held = [one for one in practised if one.states and may_hold]
        has_keep = bool(to_keep or held)
        counter, keep = shares.of(self._batch_size, has_counter=has_prompts, has_keep=has_keep)
        hinted = self._batch_size - counter - keep
        targets = targets_of(
            {LessonKind.HINT: hinted, LessonKind.COUNTER: counter, LessonKind.KEEP: keep},
            self._config.pool,
            is_rehearsing=bool(active),
            has_turns=bool(practised),
        )
        if not practised and to_return and self._knows_hints:
            targets = targets_of_return(self._batch_size, self._config.pool)
        lacking = missing(targets, counts)
        now = time.monotonic()
        if now - self._counting_since >= _TRY_AGAIN_S:
            self._made, self._counting_since = {}, now
        added: list[NewLesson] = []
        for kind, number in lacking.items():
            left = _TRIES * targets[kind] - self._made.get(kind, 0)
            count = max(min(number, left), 0)
            if count < number and kind not in self._warned:
                self._warned.add(kind)
                logger.warning(
                    "most %s lessons of version %s are dropped (%s): more in a minute",
                    kind.value,
                    self._at,
                    dict(self.sampling.dropped + self.scoring.dropped),
                )
            if kind is LessonKind.KEEP:
                others = await self._with_scopes(to_keep if count else [])
                most = math.ceil(keep / 2) if others else count
                number_held = min(count, most) if held else 0
                added += self._rota.of_hints(kind, held, number_held)
                added += self._rota.of_kept(others, count - number_held)
            else:
                # A resting hint is learned; what its turns would unlearn is taught again.
                hints = practised if kind is LessonKind.COUNTER else active
                added += self._rota.of_hints(kind, hints, count)
            self._made[kind] = self._made.get(kind, 0) + count
        if added:
            await self._store.add_lessons(added)

    async def _with_scopes(self, turn_ids: list[str]) -> list[KeptState]:
        scopes = await self._store.scopes_of(turn_ids)
        return [
            KeptState(turn_id=turn_id, scope=scopes[turn_id])
            for turn_id in turn_ids
            if turn_id in scopes
        ]
