"""The embedded trainer: a full batch of ready turns -> one step -> a checkpoint -> the engines.

    lease -> update -> checkpoint (rename) -> ONE store transaction -> publish -> prune
    leasing            versions

Killing this process at any instruction loses at most the step that it was computing. It does not
know where turns come from, nor who judged or scored them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from records.names import DropReason
from records.reading.summary import VoteSummary
from records.store import Store
from records.training.staleness import steps_since
from records.types import Ids, ReadySample
from rollout_bridge import tracing
from rollout_bridge.embedded.model.threads import in_thread
from rollout_bridge.guard.waiting import CheckWait
from rollout_bridge.holds import Holds
from rollout_bridge.rehearsal.config import RehearsalConfig
from rollout_bridge.rehearsal.mix import LessonMix
from rollout_bridge.stop_order import LOOK_EVERY_S, STOP_FILE, read_stop
from trainer.batch.side_sampling import NamedScorers
from trainer.calibration.calibrate import Calibration, Scorer
from trainer.calibration.calibrate_run import calibrate_run
from trainer.calibration.first_batch import rate_warning
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.checkpoints.manifest import Manifest
from trainer.checkpoints.restore import restore
from trainer.config import TrainerConfig
from trainer.config_checks import lessons_problem
from trainer.errors import StartupError, TrainerError
from trainer.model.heap import give_back
from trainer.publishing.publication import Publication, PublishingEngine, choose_publication
from trainer.step.leasing import Leasing
from trainer.step.metrics import MetricsLog
from trainer.step.report import (
    StepReport,
    UpdateReport,
    batch_counters,
    hint_metrics,
    stale_uncorrected,
    step_metrics,
    trained_results,
)
from trainer.step.side_samples import SideSampling
from trainer.step.update import Updater
from trainer.step.versions import Versions

logger = logging.getLogger(__name__)


class TrainedEngine(PublishingEngine, Scorer, Protocol):
    """An engine that serves the policy."""


class EmbeddedTrainer:
    """Trains the policy of one run in this process. Make it with `open`, end it with `close`."""

    def __init__(
        self,
        *,
        store: Store,
        config: TrainerConfig,
        run_folder: Path,
        checkpoints: Checkpoints,
        chain: list[Manifest],
        updater: Updater,
        engines: Mapping[str, TrainedEngine],
        thread: ThreadPoolExecutor,
        owner: str,
        rehearsal: RehearsalConfig | None,
        publication: Publication,
        guarded: bool,
        teachers: NamedScorers | None,
    ):
        self.store, self.config, self.run_folder = store, config, run_folder
        self.checkpoints = checkpoints
        self.updater = updater
        self.owner = owner
        self._lessons = LessonMix(store, config.lesson_shares, run_folder, rehearsal)
        self._publication = publication
        self.publisher = publication.publisher
        check = CheckWait(run_folder, is_on=guarded)
        self._versions = Versions(
            store=store,
            config=config,
            run_folder=run_folder,
            checkpoints=checkpoints,
            chain=chain,
            updater=updater,
            publication=publication,
            thread=thread,
            check=check,
        )
        self._engines, self._thread = engines, thread
        self._metrics = MetricsLog(run_folder, tensorboard=config.tensorboard, wandb=config.wandb)
        size = config.turns_per_step(with_lessons=rehearsal is not None)
        self._holds = Holds(
            store, config.hold_rules, run_folder, batch_size=size, version=self.manifest.version
        )
        self._leasing = Leasing(
            store=store,
            config=config,
            run_folder=run_folder,
            owner=owner,
            lessons=self._lessons,
            holds=self._holds,
            check=check,
            unusable=updater.unusable,
        )
        self._side_samples = SideSampling(
            store=store, updater=updater, leasing=self._leasing, teachers=teachers, thread=thread
        )
        self._attempts = 0
        self._skipped: Counter[DropReason] = Counter()
        self._next_engine_check = 0.0
        self._idle_since = time.perf_counter()

    @classmethod
    async def open(
        cls,
        *,
        store: Store,
        config: TrainerConfig,
        run_folder: Path,
        model: str,
        engines: Mapping[str, TrainedEngine],
        owner: str = "trainer",
        rehearsal: RehearsalConfig | None = None,
        guarded: bool = False,
        teachers: NamedScorers | None = None,
    ) -> EmbeddedTrainer:
        """Load the newest intact checkpoint (or the start `model`), make the store match its chain,
        and bring the engines to its version. With `rehearsal`, batches contain lessons. If
        `guarded`, each version waits for the guard's check before it is trained further. `teachers`
        score side samples where no model in the trainer does.

        Raises CheckpointError for a folder of another run, StartupError for an unsupported model
        or objective.
        """
        if rehearsal is not None and (problem := lessons_problem(config)) is not None:
            raise StartupError(problem)
        checkpoints = Checkpoints(run_folder / "checkpoints", model, config.seed)
        thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        try:
            chain = await in_thread(thread, checkpoints.open)
            report = await store.reconcile(
                [(link.policy_version(checkpoints.name(link)), link.turn_ids) for link in chain],
                [(link.policy_version(checkpoints.name(link)), link.lesson_ids) for link in chain],
                repeated={one for link in chain for one, time in link.time_of.items() if time > 1},
                replay_times=config.replay_times,
            )
            logger.info("resuming at version %d: %s", chain[-1].version, report)
            updater = await in_thread(thread, restore, config, checkpoints, chain[-1])
            publication = await choose_publication(
                config, engines, checkpoints, updater.policy, run_folder
            )
            trainer = cls(
                store=store,
                config=config,
                run_folder=run_folder,
                checkpoints=checkpoints,
                chain=chain,
                updater=updater,
                engines=engines,
                thread=thread,
                owner=owner,
                rehearsal=rehearsal,
                publication=publication,
                guarded=guarded,
                teachers=teachers,
            )
        except BaseException:
            thread.shutdown()
            raise
        if not await trainer._versions.follow_rollback():
            await trainer._versions.served.begin(trainer.manifest)
        return trainer

    @property
    def manifest(self) -> Manifest:
        """The newest step."""
        return self._versions.manifest

    @property
    def version(self) -> int:
        """The newest trained version."""
        return self.manifest.version

    async def calibrate(
        self, sequences: Sequence[Ids], frozen: Mapping[str, Scorer] | None = None
    ) -> Calibration:
        """Compare the policy's engines, and `frozen` ones at the start weights, with this process.

        Sets the noise floor and writes RUN/calibration.json. Raises CalibrationError for a gap,
        DistillationOffError if the policy as its own teacher teaches something.
        """
        served = self._versions.served.chosen
        return await calibrate_run(
            self.config,
            self.run_folder,
            self.checkpoints,
            self.updater,
            sequences,
            policy_engines=self._engines,
            start_engines=frozen or {},
            older=None if served == self.version else served,
            thread=self._thread,
        )

    async def check_rate(self, texts: Sequence[Ids]) -> None:
        """Before a run's first step: say so if the passes over one batch would move the policy too
        far at `texts`. The weights stay.
        """
        if self.manifest.step > 0:
            return
        policy = self.updater.policy
        warning = await in_thread(self._thread, rate_warning, policy, texts, self.config)
        await in_thread(self._thread, give_back)
        if warning is not None:
            logger.warning("%s", warning)

    async def run(
        self, stop: asyncio.Event, on_step: Callable[[StepReport], None] | None = None
    ) -> None:
        """Step whenever a batch is full, until `stop`, the file RUN/stop, or `max_steps`; with the
        file RUN/finish until nothing is ready, whatever the size of the last batch.

        A step that has begun is finished. Leases are given back on every exit. RUN/stop may order
        that an older version is served.
        """
        stop_file = self.run_folder / STOP_FILE
        holding = asyncio.create_task(self._holds.watch())
        try:
            while not (stop.is_set() or stop_file.exists() or self.is_done):
                await self._versions.follow_rollback()
                await self._housekeeping()
                report = await self.step()
                if report is not None and on_step is not None:
                    on_step(report)
                if report is None and await self._leasing.is_through():
                    break
                if report is None:
                    await _wait(stop, self.config.poll_interval_s)
            await self._versions.end(stop)
        finally:
            self._holds.close()
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)
            await self.store.release_leases(self.owner)

    def is_at_rest(self, *, when_done: bool) -> bool:
        """Whether RUN/stop is there, or, `when_done`, `max_steps` are trained."""
        return read_stop(self.run_folder) is not None or (when_done and self.is_done)

    async def serve_on(self, stop: asyncio.Event, *, when_done: bool) -> None:
        """Keep the engines at the version to serve until it is no longer at rest, or `stop`."""
        while not stop.is_set() and self.is_at_rest(when_done=when_done):
            if not await self._versions.follow_rollback():
                await self._versions.served.awaits_check(self.manifest)
            await self._repair()
            await _wait(stop, LOOK_EVERY_S)

    async def step(self) -> StepReport | None:
        """One update attempt, or None while no batch of usable turns is ready.

        Raises TrainerError after a step that failed half-way: the weights in memory may be ahead of
        every checkpoint, so only a new `open` can continue.
        """
        versions = self._versions
        if not versions.is_consistent:
            raise TrainerError("an earlier step failed half-way; open the trainer again")
        started, began = time.perf_counter(), time.time()
        if await versions.served.awaits_check(self.manifest):
            return None
        if self._holds.version != self.version:
            self._holds.step_ended(self.version)
        samples = await self._leasing.batch(versions.chain)
        if samples is None:
            return None
        staleness = [steps_since(versions.chain, sample.oldest_version) for sample in samples]
        complete = await self._side_samples.added(samples, staleness)
        if complete is None:
            return None
        samples = complete
        leased = time.perf_counter()
        versions.is_consistent = False
        self._holds.step_begins()
        report = await in_thread(
            self._thread,
            self.updater.update,
            samples,
            self.manifest.step,
            version_gaps=staleness,
            rate=self._lessons.rate(),
        )
        # A checkpoint needs memory too, and between steps nothing is needed.
        await in_thread(self._thread, give_back)
        for warning in report.warnings:
            logger.warning("step %d: %s", self.manifest.step, warning)
        self._attempts += 1
        seconds = {
            "seconds/wait": started - self._idle_since,
            "seconds/lease": leased - started,
        }
        if report.skipped is not None:
            await self._skip(samples, report)
        else:
            updated = time.perf_counter()
            seconds |= await self._commit(samples, staleness, report)
            if tracing.is_on():
                self._trace(began, seconds, updated - leased)
        versions.is_consistent = True
        votes = await self._end_hold()
        self._idle_since = time.perf_counter()
        seconds["seconds/step"] = self._idle_since - started
        metrics = (
            step_metrics(report, manifest=self.manifest, staleness=staleness, seconds=seconds)
            | batch_counters(samples, versions.chain)
            | stale_uncorrected(staleness, self.config)
            | self._counters()
            | self._holds.metrics()
            | await self._lessons.metrics(samples)
            | hint_metrics(
                votes,
                await self.store.drops(),
                await self.store.mean_score_latency(),
                await self.store.judged_share(),
            )
        )
        # A skipped attempt has no step of its own and therefore no point on the curves.
        self._metrics.write(metrics, self.manifest.step if report.skipped is None else None)
        return StepReport(
            version=None if report.skipped else self.version,
            skipped=report.skipped,
            metrics=metrics,
        )

    def _trace(self, began: float, seconds: Mapping[str, float], update_s: float) -> None:
        """The step that made the newest version, and the turns that it trained."""
        parts = {"lease": seconds["seconds/lease"], "update": update_s}
        parts |= {name: seconds[f"seconds/{name}"] for name in ("checkpoint", "commit", "publish")}
        tracing.step_spans(
            self.manifest.turn_ids,
            began,
            parts,
            {
                "opd.version": self.version,
                "opd.step": self.manifest.step,
                "opd.lessons": len(self.manifest.lesson_ids),
            },
        )

    async def _end_hold(self) -> VoteSummary:
        """Generation resumes, unless the version is staged. Returns the votes so far."""
        if not await self._versions.served.awaits_check(self.manifest):
            self._holds.step_ended(self.version)
        if self.config.holds_generation:
            await self._leasing.expire(self._versions.chain)
        votes = await self.store.vote_summary()
        self._holds.accept_rate = votes.accept_rate
        return votes

    async def close(self) -> None:
        """Give leases back and close files; the store and the engine clients are the caller's."""
        await self.store.release_leases(self.owner)
        await self.publisher.close()
        await asyncio.to_thread(self._metrics.close)
        await asyncio.to_thread(self._thread.shutdown)

    async def _commit(
        self, samples: Sequence[ReadySample], staleness: Sequence[int], report: UpdateReport
    ) -> dict[str, float]:
        """Add a version; what did not train is dropped. Returns the seconds of each part."""
        trained, seconds = await self._versions.add(
            samples,
            trained_results(samples, staleness, report),
            is_last=self._leasing.finishes,
        )
        for index, sample in enumerate(samples):
            if sample.turn_id not in trained:
                reason = report.untrained.get(index, DropReason.NONFINITE_GRADIENT)
                await self._leasing.drop(sample, reason)
        return seconds | await self._versions.publish()

    async def _skip(self, samples: Sequence[ReadySample], report: UpdateReport) -> None:
        """The batch teaches nothing: its turns are dropped, so that the next one can come."""
        assert report.skipped is not None
        self._skipped[report.skipped] += 1
        logger.warning("update attempt %d skipped: %s", self._attempts, report.skipped)
        for index, sample in enumerate(samples):
            await self._leasing.drop(sample, report.untrained.get(index, report.skipped))

    def _counters(self) -> dict[str, int]:
        """Engines that do not serve what they are to now; the rest since this process began."""
        return {
            "guard/engines_behind": self._versions.num_behind,
            "guard/merged_for_engines": int(self._publication.is_fallback),
            "update_attempts": self._attempts,
            "guard/skipped_noise": self._skipped[DropReason.BELOW_NOISE],
            "guard/skipped_nonfinite": self._skipped[DropReason.NONFINITE_GRADIENT],
            "guard/skipped_rejected": self._skipped[DropReason.ROLLOUT_REJECTED],
            "guard/skipped_teacher": self._skipped[DropReason.TEACHER_LOGPROBS_INVALID],
        }

    async def _housekeeping(self) -> None:
        """From time to time: expire what became stale, repair engines that serve something else."""
        if await self._repair():
            await self._leasing.expire(self._versions.chain)

    async def _repair(self) -> bool:
        """Repair engines that serve something else, if it is time to look."""
        now = time.monotonic()
        if now < self._next_engine_check:
            return False
        self._next_engine_check = now + self.config.engine_check_interval_s
        await self._versions.served.repair(self.manifest)
        return True

    @property
    def is_done(self) -> bool:
        """Whether `max_steps` are trained."""
        return self.config.max_steps is not None and self.manifest.step >= self.config.max_steps


async def _wait(stop: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(stop.wait(), seconds)
    except TimeoutError:
        return
