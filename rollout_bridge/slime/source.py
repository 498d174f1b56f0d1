"""Turns from the store to slime's steps, each once: lease, record, hand over, and mark trained.

    lease -> record (fsync) -> slime trains -> slime's checkpoint -> marked trained

A lease is held until a checkpoint of slime contains its step. What was handed over after the
checkpoint that a job loads is ready again (`slime_handovers`), except after a rollback: the
versions that it gives up have been served, so what they trained on stays trained. Everything here
runs on the one event loop of `slime_host`. It knows neither slime nor rows.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from uuid import uuid4

import numpy as np

from records.errors import StoreUnavailable
from records.lessons.names import LessonDrop
from records.names import DropReason, TurnState
from records.store import Store
from records.training.reconcile import ReconcileReport
from records.training.share import UNCAPPED
from records.training.staleness import oldest_allowed, steps_since
from records.types import PolicyVersion, ReadySample
from rollout_bridge.engine.hold_file import HoldRules
from rollout_bridge.guard.waiting import CheckWait
from rollout_bridge.holds import Holds
from rollout_bridge.rehearsal.kinds import counts_by_kind
from rollout_bridge.rehearsal.mix import LessonMix
from rollout_bridge.slime.handovers import (
    Handover,
    HandoverError,
    HandoverLog,
    step_versions,
    weight_start_version,
)
from rollout_bridge.slime.leases import HeldSteps
from rollout_bridge.slime.patience import patiently, wait_for_store
from rollout_bridge.slime.settings import SlimeConfigError, SlimeSettings
from rollout_bridge.stop_order import goes_back, why_stopped
from rollout_bridge.together import all_or_none

logger = logging.getLogger(__name__)

_CLOCK_SKEW_S = 300.0
"""By how much the clocks of a run's hosts may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedTurns:
    """The turns and lessons of one step, how many steps old each is, and the factor of its learning
    rate. A batch without any only lets a weight update and a checkpoint through.
    """

    samples: list[ReadySample]
    version_gaps: list[int]
    rate: float
    metrics: dict[str, float]


@dataclass(slots=True)
class _Tally:
    """What happened while a batch was gathered."""

    expired: int = 0
    unavailable_s: float = 0.0
    dropped: Counter[DropReason] = field(default_factory=Counter)


class TurnSource:
    """The store's side of one slime job. Call `resume` first; one `next_batch` at a time."""

    def __init__(
        self,
        store: Store,
        settings: SlimeSettings,
        *,
        needs_experts: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._settings, self._handover = settings, settings.handover
        self._log = HandoverLog(settings.run_folder)
        self._needs_experts = needs_experts
        self._clock = clock
        self._job = f"slime-{uuid4().hex[:12]}"
        self._tip: Handover | None = None
        """The newest record. Older ones are on disk: a long job must not keep them."""
        self._steps: list[int] = []
        """Versions that count as trained steps, oldest first."""
        self._held = HeldSteps(store, settings)
        self._lessons = LessonMix(
            store, settings.lesson_shares, settings.run_folder, settings.rehearsal
        )
        self._check = CheckWait(settings.run_folder, is_on=settings.is_guarded)
        self._resumed_at = clock()
        self._holds = Holds(
            store,
            HoldRules(
                schedule="async" if settings.hold_s is None else "sync",
                steps_off=None,
                max_hold_s=settings.hold_s or 0.0,
            ),
            settings.run_folder,
            batch_size=settings.batch_size,
            version=settings.first_version,
        )
        self._stopped: str | None = None
        self._is_leaving = False

    @property
    def version(self) -> int:
        """The version that training on everything handed over makes."""
        return self._newest().version

    def _newest(self) -> Handover:
        if self._tip is None:
            raise HandoverError("slime did not load its checkpoint before it asked for turns")
        return self._tip

    async def resume(self, rollout_id: int) -> ReconcileReport:
        """Make the store equal to the weights after rollout `rollout_id` (-1: the start).

        Turns handed over later are ready again, unless this is a rollback. Raises SlimeConfigError
        if weight labels would repeat, HandoverError if records and checkpoint do not match,
        StoreUnavailable.
        """
        first = self._settings.first_version
        folder = self._settings.run_folder
        used = await patiently(self._handover, lambda: weight_start_version(self._store, folder))
        if first <= used:
            raise SlimeConfigError(
                f"update_weight_start_version = {first - 1} would repeat labels of older weights: "
                f"set it to {used} in the file of --custom-config-path"
            )
        chain = await asyncio.to_thread(self._chain, rollout_id)
        if not chain and not self._log.highest_version():
            await self._check_untrained()
        parent = chain[-1] if chain else None
        start = Handover(
            kind="start",
            version=first,
            parent_version=None if parent is None else parent.version,
            parent_hash=None if parent is None else parent.hash,
            rollout_id=rollout_id,
            turn_ids=(),
            staleness=(),
            created_at=self._clock(),
            restores=None if self._settings.rollback is None else self._settings.rollback.restores,
        )
        chain.append(start)
        links = [(self._policy_version(record), record.turn_ids) for record in chain]
        lessons = [(self._policy_version(record), record.lesson_ids) for record in chain]
        report = await patiently(self._handover, lambda: self._store.reconcile(links, lessons))
        await asyncio.to_thread(self._log.write, start)
        self._tip, self._steps = start, step_versions(chain)
        self._resumed_at = self._clock()
        logger.info("slime resumes after rollout %d as version %d: %s", rollout_id, first, report)
        return report

    def _chain(self, rollout_id: int) -> list[Handover]:
        """What led to the weights that the job begins with, the versions that it gives up
        included. Raises HandoverError.
        """
        back = self._settings.rollback
        if back is None:
            return self._log.chain(rollout_id)
        chain = self._log.newest_chain(back.parent)
        found = {one.version: one.rollout_id for one in chain}
        if found.get(back.restores) != rollout_id:
            raise HandoverError(
                f"{self._log.folder}: the job goes back to version {back.restores}, which is after "
                f"rollout {found.get(back.restores)}, but slime loaded the checkpoint of rollout "
                f"{rollout_id}"
            )
        return chain

    async def next_batch(self, rollout_id: int) -> LeasedTurns:
        """The turns of rollout `rollout_id`: a full batch, or after `max_wait_s` a smaller one.

        With nothing ready it goes on waiting, except for one batch without turns if an earlier step
        may still wait to reach the engines and a checkpoint. Raises StoreUnavailable after
        `store_patience_s`, StoreConflict if another trainer took leased turns, HandoverError for
        weight labels that are not this job's.
        """
        # train.py asks for a batch once the engines have the weights of the one before it.
        self._holds.step_ended(self.version)
        await patiently(self._handover, lambda: self._held.served(rollout_id - 1))
        started = time.monotonic()
        owner = f"{self._job}-{rollout_id}-{self.version + 1}"
        tally = _Tally()
        samples = await self._gather(owner, started, tally)
        if samples:
            self._holds.batch_is_full()
        gaps = [steps_since(self._steps, sample.oldest_version) for sample in samples]
        waited_s = time.monotonic() - started
        await self._record(rollout_id, owner, samples, gaps)
        metrics = await self._metrics(samples, gaps, tally, waited_s)
        return LeasedTurns(
            samples=samples, version_gaps=gaps, rate=self._lessons.rate(), metrics=metrics
        )

    def end_hold(self) -> None:
        """Let generation go on."""
        self._holds.close()

    async def checkpointed(self, rollout_id: int) -> None:
        """slime's checkpoint of rollout `rollout_id` exists: mark its steps trained.

        Raises StoreUnavailable; `hold` tries again, and a new job's `resume` would do it too.
        """
        await self._held.saved(rollout_id)

    async def hold(self) -> None:
        """Keep what was handed over leased, mark what checkpoints contain, and end a hold that must
        end, until cancelled. Raises StoreConflict if another trainer took leased turns.
        """
        await all_or_none([self._held.keep(), self._holds.watch()])

    async def _gather(self, owner: str, started: float, tally: _Tally) -> list[ReadySample]:
        handover, wanted = self._handover, self._settings.batch_size
        samples: list[ReadySample] = []
        silent_since: float | None = None
        next_word_s = handover.max_wait_s
        while True:
            waited_s = time.monotonic() - started
            is_late = waited_s >= handover.max_wait_s
            try:
                if silent_since is not None:
                    # The failed attempt may have leased turns although its answer was lost.
                    await self._store.release_leases(owner)
                if await self._must_wait():
                    silent_since = None
                    is_last = goes_back(self._settings.run_folder)
                    if (is_late or is_last) and self._update_may_wait():
                        return []
                    await asyncio.sleep(handover.poll_interval_s)
                    continue
                samples += await self._lease(owner, wanted - len(samples), is_late, tally)
            except StoreUnavailable as error:
                samples = []
                now = time.monotonic()
                silent_since = now if silent_since is None else silent_since
                await wait_for_store(handover, now - silent_since, error)
                tally.unavailable_s += time.monotonic() - started - waited_s
                continue
            silent_since = None
            if len(samples) == wanted or (is_late and (samples or self._update_may_wait())):
                return samples
            if waited_s >= next_word_s:
                next_word_s = waited_s + handover.max_wait_s
                logger.info("no ready turn for %.0f s; still waiting", waited_s)
            await asyncio.sleep(handover.poll_interval_s)

    async def _must_wait(self) -> bool:
        """Whether nothing may train yet: there is a stop order, the job is to end because the run
        goes back, or the newest version has still to be measured or checked.
        """
        why = why_stopped(self._settings.run_folder)
        if why is not None and why != self._stopped:
            logger.error("training stops: %s; it goes on once RUN/stop is removed", why)
        self._stopped = why
        if goes_back(self._settings.run_folder):
            if not self._is_leaving:
                logger.warning("no more batches: the run goes back, and the launch ends this job")
            self._is_leaving = True
            return True
        self._is_leaving = False
        if why is not None:
            return True
        if self._check.awaits(self.version):
            return True
        return await self._lessons.awaits_measurement(self.version)

    def _update_may_wait(self) -> bool:
        """Whether the last step had turns: train_async.py updates the engines, and writes a
        checkpoint, only after the next batch has arrived. train.py has already done both.
        """
        return self._settings.is_pipelined and bool(self._newest().turn_ids)

    async def _lease(
        self, owner: str, wanted: int, is_late: bool, tally: _Tally
    ) -> list[ReadySample]:
        """`wanted` usable turns or, if it is late, as many as there are; else none. A batch with
        lessons is whole or not at all: what they preserve would otherwise be lost.
        """
        rehearses = self._settings.rehearsal is not None
        is_late = is_late and not (rehearses and await self._store.is_practising())
        outcomes = self._settings.needs.outcomes
        if outcomes is not None:
            await self._store.drop_without_outcome(outcomes)
        turns = await self._store.ready_count(outcomes)
        least = 1 if is_late else wanted
        if turns + await self._lessons.num_ready() < least:
            return []
        # A turn whose lease ran out while the store was down still belongs to a step.
        await self._held.extend()
        oldest = oldest_allowed(self._steps, self._settings.max_staleness)
        tally.expired += await self._store.expire_stale(oldest_allowed=oldest)
        await self._store.expire_lessons(oldest_allowed=self.version)
        turns = await self._store.ready_count(outcomes)
        counts = [wanted] if turns + await self._lessons.num_ready() >= wanted else []
        if is_late and 0 < turns < wanted:
            counts.append(turns)
        leased: list[ReadySample] = []
        for count in counts:
            leased = await self._store.lease(
                owner=owner,
                count=count,
                ttl_s=self._settings.lease_ttl_s,
                share=UNCAPPED if is_late else self._settings.share,
                lessons=self._lessons.shares(is_full=turns >= wanted, finishes=False),
                history=self._settings.needs.history,
                outcomes=outcomes,
            )
            if leased:
                self._lessons.leased()
                break
        usable = []
        for sample in leased:
            self._check_labels(sample)
            reason = self._unusable(sample)
            if reason is None:
                usable.append(sample)
            elif await self._drop(owner, sample, reason):
                tally.dropped[reason] += 1
        if rehearses and len(usable) < len(leased):
            await self._store.release_leases(owner)
            return []
        return usable

    async def _drop(self, owner: str, sample: ReadySample, reason: DropReason) -> bool:
        if sample.lesson is None:
            return await self._store.drop(owner, sample.turn_id, reason)
        return await self._store.drop_lesson(owner, sample.turn_id, LessonDrop(reason.value))

    def _unusable(self, sample: ReadySample) -> DropReason | None:
        """Why the run's objective cannot train on a sample; None if it can."""
        vocab_size = self._settings.probes.vocab_size
        if vocab_size is not None and not sample.fits_vocabulary(vocab_size):
            return DropReason.FOREIGN_TOKENS
        if not np.isfinite(sample.rollout_logprobs).all():
            return DropReason.ROLLOUT_LOGPROBS_INVALID
        if self._needs_experts and sample.routed_experts is None:
            return DropReason.ROUTED_EXPERTS_MISSING
        return self._settings.needs.lacking(sample)

    def _check_labels(self, sample: ReadySample) -> None:
        """Raises HandoverError for tokens of weights that the engines cannot have served."""
        first, newest = (
            self._settings.first_version,
            max(span.version for span in sample.version_spans),
        )
        is_new = sample.created_at > self._resumed_at + _CLOCK_SKEW_S
        if newest > self.version or (is_new and sample.oldest_version < first):
            raise HandoverError(
                f"turn {sample.turn_id} has tokens of versions {sample.oldest_version} to {newest},"
                f" but this job's weights are {first} to {self.version}: the engines must be this "
                "job's, and slime must count from update_weight_start_version"
            )

    async def _record(
        self, rollout_id: int, owner: str, samples: Sequence[ReadySample], gaps: Sequence[int]
    ) -> None:
        tip = self._newest()
        turns = [pair for pair in zip(samples, gaps, strict=True) if pair[0].lesson is None]
        lessons = [sample for sample in samples if sample.lesson is not None]
        record = Handover(
            kind="step",
            version=tip.version + 1,
            parent_version=tip.version,
            parent_hash=tip.hash,
            rollout_id=rollout_id,
            turn_ids=tuple(sample.turn_id for sample, _ in turns),
            staleness=tuple(gap for _, gap in turns),
            created_at=self._clock(),
            lesson_ids=tuple(sample.turn_id for sample in lessons),
        )
        await asyncio.to_thread(self._log.write, record)
        self._tip = record
        self._steps.append(record.version)
        self._held.add(owner, record)

    async def _check_untrained(self) -> None:
        counts = await patiently(self._handover, self._store.counts)
        trained = counts.get(TurnState.TRAINED, 0)
        if trained:
            raise HandoverError(
                f"{self._log.folder} is empty, but the store has {trained} trained turns: restore "
                "the records, or use a new store"
            )

    def _policy_version(self, record: Handover) -> PolicyVersion:
        return record.policy_version(self._settings.save_folder)

    async def _metrics(
        self,
        samples: Sequence[ReadySample],
        gaps: Sequence[int],
        tally: _Tally,
        waited_s: float,
    ) -> dict[str, float]:
        """Metrics of this batch; a mean over nothing is left out."""
        metrics: dict[str, float] = {
            "handover/version": self.version,
            "handover/turns": sum(sample.lesson is None for sample in samples),
            "handover/is_full": float(len(samples) == self._settings.batch_size),
            "handover/is_refresh": float(not samples),
            "handover/wait_s": waited_s,
            "handover/store_unavailable_s": tally.unavailable_s,
            "handover/expired_stale": tally.expired,
            "handover/unchecked_steps": len(self._held),
            "handover/policy_tokens": sum(len(sample.response_ids) for sample in samples),
        }
        metrics |= self._holds.metrics()
        metrics |= {f"handover/dropped_{reason}": count for reason, count in tally.dropped.items()}
        if samples:
            metrics |= counts_by_kind(samples)
            try:
                metrics |= await self._lessons.metrics(samples)
            except StoreUnavailable as error:
                logger.warning("a batch without the metrics of lessons: %s", error)
            metrics["handover/staleness_mean"] = float(np.mean(gaps))
            metrics["handover/staleness_max"] = max(gaps)
        return metrics
