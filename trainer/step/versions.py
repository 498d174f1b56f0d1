"""The chain of a run's versions: each step or rollback adds one, and the engines follow.

    checkpoint (rename) -> ONE store transaction -> publish -> prune

The order makes every turn count once: the renamed checkpoint decides, and the store is made to
match it at start. It does not know which batch comes next, nor what a step computes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from records.store import Store
from records.training.step_results import SampleResult
from records.types import ReadySample
from rollout_bridge.embedded.model.threads import in_thread
from rollout_bridge.guard.waiting import LAST_CHECK_S, CheckWait
from rollout_bridge.stop_order import STOP_FILE, serve_newest
from trainer.checkpoints.checkpoint import Checkpoints, can_go_on_from
from trainer.checkpoints.manifest import Manifest
from trainer.checkpoints.restore import go_back
from trainer.config import TrainerConfig
from trainer.errors import CheckpointError
from trainer.model.heap import give_back
from trainer.model.teacher_models import EmaTeacher
from trainer.publishing.publication import Publication
from trainer.publishing.publish import PublishedWeights
from trainer.publishing.served import Served
from trainer.schedule.rollback_order import read_rollback, remove_rollback
from trainer.step.update import Updater

logger = logging.getLogger(__name__)


class Versions:
    """The surviving versions of one run, of which the newest trains on. Work on weights is done in
    `thread`, the trainer's own.
    """

    def __init__(
        self,
        *,
        store: Store,
        config: TrainerConfig,
        run_folder: Path,
        checkpoints: Checkpoints,
        chain: Sequence[Manifest],
        updater: Updater,
        publication: Publication,
        thread: ThreadPoolExecutor,
        check: CheckWait,
    ) -> None:
        self._store, self._config, self._run_folder = store, config, run_folder
        self._checkpoints, self._updater, self._thread = checkpoints, updater, thread
        self._publication = publication
        self.manifest = chain[-1]
        """The newest step; its version is what the engines are to serve, unless RUN/stop says
        another, or it is staged."""
        self.chain = [link.version for link in chain]
        """All surviving versions, oldest first."""
        self._last_resumable = chain[-1].version
        """The version that a crash would return to."""
        self.served = Served(
            run_folder, checkpoints, publication.publisher, self._weights_of, check
        )
        self.is_consistent = True
        """Whether weights in memory are those of the newest version: not while it changes."""

    @property
    def newest(self) -> int:
        """The newest trained version."""
        return self.manifest.version

    async def _weights_of(self, version: int) -> PublishedWeights:
        """What an engine loads to serve a version whose weights are kept."""
        policy = self._updater.policy if version == self.newest else None
        return await in_thread(self._thread, self._publication.weights.of, version, policy)

    async def add(
        self, samples: Sequence[ReadySample], results: Sequence[SampleResult], *, is_last: bool
    ) -> tuple[Set[str], dict[str, float]]:
        """Record what a step made of `samples`, of which the `results` trained: a checkpoint, then
        the store. Returns the ids that trained and the seconds of both. `is_last`: no step follows.
        """
        begun = time.perf_counter()
        version = max(await self._store.next_version(), self._checkpoints.highest_version() + 1)
        rehearsed = {sample.turn_id for sample in samples if sample.lesson is not None}
        times = {one.turn_id: one.times_trained + 1 for one in samples if one.lesson is None}
        manifest = await in_thread(
            self._thread, self._write, version, results, times, rehearsed, is_last
        )
        written = time.perf_counter()
        lessons = set(manifest.lesson_ids)
        await self._store.commit_step(
            version=manifest.policy_version(self._checkpoints.name(manifest)),
            results=[one for one in results if one.turn_id not in lessons],
            lessons=[one for one in results if one.turn_id in lessons],
            replay_times=self._config.replay_times,
        )
        self.manifest = manifest
        self.chain.append(version)
        if can_go_on_from(manifest):
            self._last_resumable = version
        seconds = {
            "seconds/checkpoint": written - begun,
            "seconds/commit": time.perf_counter() - written,
        }
        return {*manifest.turn_ids, *lessons}, seconds

    async def publish(self) -> dict[str, float]:
        """The engines follow, and what is no longer needed is deleted; the seconds of both."""
        begun = time.perf_counter()
        await self.served.publish(self.manifest)
        published = time.perf_counter()
        await in_thread(self._thread, self._prune)
        return {
            "seconds/publish": published - begun,
            "seconds/prune": time.perf_counter() - published,
        }

    async def follow_rollback(self) -> bool:
        """Follow RUN/rollback, if it is there: publish a new version with the older weights.

        The renamed checkpoint decides, as after a step. An order that a killed process followed
        that far is only removed. One that cannot be followed is logged and removed.
        """
        version = read_rollback(self._run_folder)
        if version is None:
            return False
        if self.manifest.restores != version:
            number = max(await self._store.next_version(), self._checkpoints.highest_version() + 1)
            try:
                manifest = await in_thread(
                    self._thread,
                    lambda: self._checkpoints.roll_back(
                        version, parent=self.manifest, new_version=number
                    ),
                )
            except CheckpointError as error:
                logger.error("no rollback: %s", error)
                remove_rollback(self._run_folder)
                return False
            await self._take_back(manifest)
        serve_newest(self._run_folder)
        await self.served.publish(self.manifest)
        remove_rollback(self._run_folder)
        await in_thread(self._thread, self._prune)
        logger.warning("version %d is served: it restores version %d", self.newest, version)
        return True

    async def end(self, stop: asyncio.Event) -> None:
        """Training ends: what it made last is published if it passes within `LAST_CHECK_S`; then
        an order to serve another version is obeyed.
        """
        until, stop_file = time.monotonic() + LAST_CHECK_S, self._run_folder / STOP_FILE
        while await self.served.awaits_check(self.manifest):
            if stop.is_set() or stop_file.exists():
                break
            if time.monotonic() >= until:
                logger.error(
                    "version %d is not published: it was not checked within %.0f s",
                    *(self.newest, LAST_CHECK_S),
                )
                break
            await asyncio.sleep(self._config.poll_interval_s)
        await self.served.obey(self.manifest)

    async def _take_back(self, manifest: Manifest) -> None:
        """Store, weights and optimiser follow the link of a rollback."""
        self.is_consistent = False
        await self._store.commit_step(
            version=manifest.policy_version(self._checkpoints.name(manifest)),
            results=[],
            lessons=[],
        )
        await in_thread(
            self._thread, go_back, self._config, self._checkpoints, manifest, self._updater
        )
        self.manifest = manifest
        self.chain.append(manifest.version)
        self._last_resumable = manifest.version
        self.is_consistent = True

    def _write(
        self,
        version: int,
        results: Sequence[SampleResult],
        times: Mapping[str, int],
        rehearsed: Set[str],
        is_last: bool,
    ) -> Manifest:
        teacher = self._updater.teacher
        turns = [result for result in results if result.turn_id not in rehearsed]
        lessons = [result for result in results if result.turn_id in rehearsed]
        return self._checkpoints.write(
            self._updater.policy,
            self._updater.optimizer,
            parent=self.manifest,
            version=version,
            turn_ids=[result.turn_id for result in turns],
            staleness=[result.staleness for result in turns],
            times=[times[result.turn_id] for result in turns],
            lesson_ids=[result.turn_id for result in lessons],
            lesson_staleness=[result.staleness for result in lessons],
            average=teacher if isinstance(teacher, EmaTeacher) else None,
            with_optimizer=is_last or self._keeps_optimizer(self.manifest.step + 1),
        )

    def _keeps_optimizer(self, step: int) -> bool:
        """Whether the checkpoint of this step is one to resume from; the last one always is."""
        return step == self._config.max_steps or step % self._config.optimizer_every == 0

    def _prune(self) -> None:
        recent = self.chain[-self._config.versions_kept :]
        served = [version for version in self._served_versions if version is not None]
        self._checkpoints.prune({*recent, *served, self._last_resumable})
        self._publication.weights.prune({*served, self.newest})
        give_back()

    @property
    def num_behind(self) -> int:
        """Engines that do not serve the version that they are to serve."""
        return sum(version != self.served.chosen for version in self._served_versions)

    @property
    def _served_versions(self) -> Collection[int | None]:
        return self._publication.publisher.served.values()
