"""The guard: sends each version the run's canaries, and orders a rollback if one is too bad.

Where engines hold several adapters, a version is staged while it is checked, and serves nobody
until it has passed. Elsewhere it serves meanwhile, and is withdrawn if it fails. Either way the
trainer takes no step from it until it has passed. After one that failed, the trainer, or on a
cluster the launch, publishes the newest version that passed, as a new version, and training stops
until somebody resumes it (`opd policy resume`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from opd.guard.asking import Asked, Asker, State
from opd.guard.config import GuardConfig
from opd.guard.gap import GapMeasurer, TaughtTurn
from opd.guard.last_good import Scorer, kl_from, read_last_good, write_last_good
from opd.guard.limits import breaches
from opd.guard.metrics import GuardMetrics
from opd.rehearsal.policy_sampler import PolicySampler
from records.errors import StoreError
from rollout_bridge.engine.errors import EngineError
from rollout_bridge.engine.served import StagedFirst
from rollout_bridge.guard.checks import Checked, Figures, add_check, read_checks
from rollout_bridge.stop_order import StopOrder, read_stop, stop_and_serve
from rollout_bridge.worker import ServiceUnavailable
from trainer.schedule.rollback_order import order_rollback

logger = logging.getLogger(__name__)

POLL_S = 1.0
_LONGEST_PAUSE_S = 60.0
START = 0


class GuardRecords(Protocol):
    """What the guard asks the store. Raises StoreError."""

    async def versions_given_up(self) -> Set[int]: ...
    async def taught_turns(self, most: int) -> Sequence[TaughtTurn]: ...


class GuardWorker:
    """Checks versions one after another. `policy` samples from the version to check, the staged
    one or else the one that serves, `start` from the frozen start model, both at temperature 1, and
    `scores` is the version to check again; `version` asks which it is, `states` which recorded
    requests are answered besides.
    """

    def __init__(
        self,
        asker: Asker,
        config: GuardConfig,
        *,
        policy: PolicySampler,
        start: PolicySampler,
        version: Callable[[], Awaitable[int]],
        states: Callable[[], Awaitable[Sequence[State]]],
        scores: Scorer,
        gap: GapMeasurer,
        records: GuardRecords,
        folder: Path,
        metrics: GuardMetrics,
    ) -> None:
        self._choice = StagedFirst(folder)
        self._asker, self._config, self._folder = asker, config, folder
        self._policy, self._start_model, self._version = policy, start, version
        self._states = states
        self._scores, self._gap, self._records = scores, gap, records
        self._metrics = metrics
        rows = read_checks(folder)
        self._start = next((row for row in rows if row.version == START), None)
        self._passed = {row.version for row in rows if not row.breaches}
        self._good = read_last_good(folder)
        self._last = rows[-1] if rows else None
        # A cluster's launch restarts this process for each rollback.
        for row in rows:
            if row.breaches:
                metrics.count_failed(row)
        if rows:
            metrics.set(rows[-1])

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set."""
        failures = 0
        stopping = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set():
                pause_s = POLL_S
                look = asyncio.create_task(self.look())
                await asyncio.wait([look, stopping], return_when=asyncio.FIRST_COMPLETED)
                if not look.done():
                    look.cancel()
                    await asyncio.gather(look, return_exceptions=True)
                    return
                try:
                    look.result()
                    failures = 0
                except (EngineError, ServiceUnavailable, StoreError) as error:
                    failures += 1
                    pause_s = min(POLL_S * 2.0 ** min(failures, 30), _LONGEST_PAUSE_S)
                    logger.warning("the guard waits %.0f s: %s", pause_s, error)
                await asyncio.wait([stopping], timeout=pause_s)
        finally:
            stopping.cancel()

    async def look(self) -> None:
        """Check the staged or serving version, if it was not. Raises EngineError,
        ServiceUnavailable, StoreError.
        """
        if self._start is None:
            self._start = await self._ask_start()
        version = await self._version()
        if not self._is_due(version):
            return
        passed = self._passed - await self._records.versions_given_up()
        asked = await self._measured(version, passed)
        if await self._version() != version:
            return  # another version has sampled a part of it
        problems = breaches(self._config, self._start, asked.row)
        staged = self._choice.is_unserved(version)
        found = asked.row.model_copy(update={"breaches": problems, "staged": staged})
        if problems:
            self._go_back(found, passed)
        else:
            self._passed.add(version)
            await asyncio.to_thread(self._keep, asked)
        # Only now: the trainer continues once it reads this.
        add_check(self._folder, found)
        self._last = found
        self._metrics.set(found)
        logger.info(
            "version %d: %d of %d answers to canaries are right", version, found.passed, found.asked
        )

    async def _measured(self, version: int, passed: Set[int]) -> Asked:
        """A version's answers, and all that its limits are about. Raises as `look`."""
        began = time.monotonic()
        asked = await self._asker.ask(self._policy, version=version, samples=self._config.samples)
        values = await self._recorded() | await self._jump(passed) | await self._gap_at(version)
        row = asked.row.model_copy(update=values | {"took_s": time.monotonic() - began})
        return replace(asked, row=row)

    async def _recorded(self) -> dict[str, Figures]:
        """Answers of both models to recorded requests; nothing without any. Raises EngineError,
        StoreError.
        """
        states = await self._states()
        if not states:
            return {}
        samples = self._config.samples
        return {
            "recorded": await self._asker.measure(self._policy, states, samples=samples),
            "recorded_start": await self._asker.measure(self._start_model, states, samples=samples),
        }

    async def _jump(self, passed: Set[int]) -> dict[str, Any]:
        """How far the last good version is; nothing if its answers are not known, or if it was
        rolled back. Raises EngineError.
        """
        good = self._good
        if good is None or good.version not in passed:
            return {}
        return {"kl_last": await kl_from(good, self._scores), "last_good": good.version}

    async def _gap_at(self, version: int) -> dict[str, Any]:
        """The gap at turns that trained under a hint, and the start's. Raises ServiceUnavailable,
        StoreError.
        """
        most = self._config.gap_turns
        taught = await self._records.taught_turns(most) if most else []
        if not taught:
            return {}
        gap, of_start = await self._gap.measure(
            taught, samples=self._config.samples, version=version
        )
        return {"gap": gap, "gap_start": of_start}

    def _keep(self, asked: Asked) -> None:
        samples = self._config.samples
        self._good = write_last_good(
            self._folder, asked.row.version, asked.answers, samples=samples
        )

    def _is_due(self, version: int) -> bool:
        """Whether this version must be checked. A failed one is checked again once somebody
        has removed the order to stop.
        """
        if version == START or version in self._passed:
            return False
        is_last = self._last is not None and self._last.version == version
        return not is_last or read_stop(self._folder) is None

    async def _ask_start(self) -> Checked:
        asked = await self._asker.ask(
            self._start_model, version=START, samples=self._config.start_samples
        )
        found = asked.row
        if found.asked == 0:
            logger.error("no answer to a canary could be checked: canaries guard nothing")
        elif found.passed < found.asked / 2:
            worst = ", ".join(sorted(found.failed, key=lambda name: -found.failed[name])[:3])
            logger.warning(
                "the start model passes only %d of %d canaries (worst: %s): they guard little",
                found.passed,
                found.asked,
                worst,
            )
        await asyncio.to_thread(self._keep, asked)
        add_check(self._folder, found)
        self._last = found
        self._passed.add(START)
        self._metrics.set(found)
        return found

    def _go_back(self, found: Checked, passed: Set[int]) -> None:
        """Order the stop, then the rollback: if killed in between, the last good version serves,
        and a resumed run checks this one again. The start has no checkpoint to continue from, so it
        only serves.
        """
        good = max((one for one in passed if one < found.version), default=START)
        what = "did not publish" if found.staged else "withdrew"
        reason = f"the guard {what} version {found.version}: {'; '.join(found.breaches)}"
        logger.error("%s; version %d serves%s", reason, good, "" if found.staged else " again")
        stop_and_serve(self._folder, StopOrder(reason=reason, serve_version=good))
        if good != START:
            order_rollback(self._folder, good)
        self._metrics.count_failed(found)
