"""A replay at work: import, judging, scoring, training, and the gap that is left.

Composition only. Recorded turns enter the store as turns of ordinary sessions, and the run's usual
processes work on them; nothing here judges, scores or trains. Everything can be stopped at any
point and started again with the same arguments: what is done stays done. `give_to_run` puts the
turns into the store of another run, whose processes work on them when no live turn waits.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from opd.processes.run import FINISH_FILE, Run
from opd.rehearsal.heartbeat import seconds_since
from opd.replay.importing import ImportSettings
from opd.replay.modes import ReplayMode
from opd.replay.show import ReplayProgress
from opd.replay.taking_in import ImportReport, take_in
from opd.report.curves import metric_rows
from opd.report.run_summary import run_summary
from opd.report.terminal.log_notices import notices_said
from opd.run import config as run_config
from opd.run.checks import run_warnings
from opd.run.config import RunConfig
from opd.run.resuming import CONFIG_FILE
from records.database import fail_points
from records.hints.types import HintStatus
from records.names import TurnState
from records.reading.replay_status import ReplayStatus
from records.store import Store
from rollout_bridge.rendering.fingerprint import renderer_fingerprint
from rollout_bridge.rendering.rendering import Rendering
from rollout_bridge.stop_order import read_stop
from trainer.errors import StartupError

if TYPE_CHECKING:
    from opd.evaluation.gap import CaseGap, HintedCase

GAP_TURNS = 32
"""Most held-out turns, and most trained ones, on which the gap is measured."""
_LOOK_EVERY_S = 0.5
_STILL_S = 120.0
"""A hint may wait for recorded requests that never come."""
_STILL_AT_WORK_S = 1800.0
"""The same while judge and engines still answer for hints: all that they make may be dropped."""
_UNSCORED = (TurnState.JUDGING, TurnState.SCORING)
_UNTRAINED = (TurnState.READY, TurnState.LEASED)


class NothingLearned(StartupError):
    """The replay ended, and no turn could be trained on, or judged."""


def replay_all(
    config: RunConfig,
    folder: Path,
    console: Console,
    recordings: Sequence[Path],
    votes: Sequence[Path],
) -> dict[str, Any]:
    """Run the replay in `folder` to its end; returns the summary that it writes.

    Raises NothingLearned.
    """
    try:
        return asyncio.run(_Replay(config, folder, console, recordings, votes).run())
    except KeyboardInterrupt:
        console.print("stopped; what is done stays done: the same command continues from here")
        raise


def give_to_run(
    config: RunConfig,
    folder: Path,
    console: Console,
    recordings: Sequence[Path],
    votes: Sequence[Path],
) -> ImportReport:
    """Import into the store of the run in `folder`, and show its processes' progress."""
    replayed = _Replay(config, folder, console, recordings, votes)
    try:
        return asyncio.run(replayed.hand_over())
    except KeyboardInterrupt:
        console.print(
            "stopped watching; the run has all turns, and the same command shows its progress"
            if replayed.is_imported
            else "stopped before all was handed over: the same command hands over the rest",
            soft_wrap=True,
        )
        raise


class _Replay:
    """One replay in its own folder."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        console: Console,
        recordings: Sequence[Path],
        votes: Sequence[Path],
    ) -> None:
        self._config, self._folder, self._console = config, folder, console
        self._recordings, self._votes = tuple(recordings), tuple(votes)
        self._mode: ReplayMode = config.replay.mode
        self._rehearses = config.rehearsal.enabled
        self._timings: dict[str, float] = {}
        self.is_imported = False
        """Whether all recordings are in the store."""

    async def run(self) -> dict[str, Any]:
        from opd.replay.summary import build_summary, save, summary_lines

        started = time.monotonic()
        config = self._config
        for warning in run_warnings(config.trainer):
            self._console.print(f"[yellow]{warning}[/]")
        self._say(
            f"run folder [bold]{escape(str(self._folder))}[/]; replay ({self._mode}) with "
            f"{escape(config.model)}"
        )
        rendering = await asyncio.to_thread(Rendering.load, config.model, config.renderer)
        async with await Store.open(config.store) as store:
            run_config.save(config, self._folder / CONFIG_FILE)
            with ReplayProgress(self._console, self._mode) as shown:
                imported = await self._import(store, rendering, shown)
                if config.replay.hard_samples > 1 and not await store.has_recorded_outcomes():
                    raise StartupError(
                        "replay.hard_samples: no recording has an outcome_reward, so no task is "
                        "known to be hard; leave the setting out"
                    )
                if await self._has_work(store):
                    shown.starting()
                    async with (
                        Run(config, self._folder) as processes,
                        notices_said(self._console, self._folder / "logs"),
                    ):
                        await processes.start_engines()
                        await self._work(store, processes, shown)
                status = await store.replay_status()
                gaps = await self._gaps(store, shown)
            self._timings["everything"] = time.monotonic() - started
            summary = build_summary(
                mode=self._mode,
                model=config.model,
                imported=imported,
                status=status,
                num_updates=await _num_updates(store),
                gaps=gaps,
                timings=self._timings,
            )
            if self._rehearses:
                summary["learning"] = await run_summary(
                    self._folder, store, metric_rows(self._folder)
                )
            report = await save(self._folder, summary, store, rendering)
        for line in summary_lines(summary):
            self._console.print(line, soft_wrap=True, highlight=False, markup=False)
        self._say(f"report: [bold]{escape(str(report))}[/]")
        self._check_learned(status, summary["updates"])
        return summary

    async def hand_over(self) -> ImportReport:
        """Import, then watch until nothing waits for judge or teacher."""
        from opd.replay.summary import handed_over_lines

        config = self._config
        self._say(
            f"into the store of [bold]{escape(str(self._folder))}[/]: its processes work on the "
            "turns when no live turn waits (Ctrl-C leaves them to it)"
        )
        rendering = await asyncio.to_thread(Rendering.load, config.model, config.renderer)
        async with await Store.open(config.store) as store:
            with ReplayProgress(self._console, self._mode) as shown:
                imported = await self._import(store, rendering, shown)
                self.is_imported = True
                status = await self._looked_on(store, shown)
        for line in handed_over_lines(imported, status):
            self._console.print(line, soft_wrap=True, highlight=False, markup=False)
        return imported

    async def _looked_on(self, store: Store, shown: ReplayProgress) -> ReplayStatus:
        is_done = _is_scored(self._mode)
        while True:
            status = await store.replay_status()
            shown.working(status)
            shown.training(status, await _num_updates(store))
            if is_done(status):
                return status
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _import(
        self, store: Store, rendering: Rendering, shown: ReplayProgress
    ) -> ImportReport:
        begun = time.monotonic()
        settings = ImportSettings(
            context_length=self._config.scoring.context_length,
            held_out=self._config.replay.held_out,
            renderer=renderer_fingerprint(rendering, self._config.renderer),
            routes=self._config.scoring.routes,
        )
        report = await take_in(
            store,
            rendering,
            settings,
            self._recordings,
            self._votes,
            self._folder,
            shown.imported,
        )
        shown.import_ended(report)
        self._timings["import"] = time.monotonic() - begun
        return report

    async def _work(self, store: Store, processes: Run, shown: ReplayProgress) -> None:
        begun = time.monotonic()
        trains_along = self._mode == "resample" or self._rehearses
        if self._rehearses or not _is_scored(self._mode)(await store.replay_status()):
            await processes.start_judge()
        if trains_along:
            # The policy samples while it learns, which makes it on-policy.
            await self._start_trainer(processes)
        await self._until(store, processes, shown, _is_scored(self._mode))
        if self._rehearses:
            await self._until_rest(store, processes, shown)
        self._timings["judging and scoring"] = time.monotonic() - begun
        if self._mode == "judge-only":
            return
        begun = time.monotonic()
        (self._folder / FINISH_FILE).touch()
        # Leased turns too: a killed trainer may have left them, and the next one releases them.
        if not trains_along and not _is_trained(await store.replay_status()):
            await self._start_trainer(processes)
        await self._until(store, processes, shown, _is_trained, training=True)
        await processes.supervisor.stop("judge", "trainer")
        self._timings["training"] = time.monotonic() - begun

    async def _start_trainer(self, processes: Run) -> None:
        await processes.start_trainer(may_finish=True)
        for warning in processes.calibration_warnings():
            self._say(f"[yellow]{escape(warning)}[/]")

    async def _until(
        self,
        store: Store,
        processes: Run,
        shown: ReplayProgress,
        is_done: Callable[[ReplayStatus], bool],
        *,
        training: bool = False,
    ) -> None:
        while True:
            status = await store.replay_status()
            shown.working(status)
            if training or self._mode == "resample" or self._rehearses:
                shown.training(status, await _num_updates(store))
            if processes.supervisor.failed.done():
                processes.supervisor.failed.result()
            if is_done(status) or (training and read_stop(self._folder) is not None):
                return
            if processes.supervisor.has_finished("trainer"):
                if training:
                    self._say_what_is_left(await store.replay_status(), shown)
                return
            await asyncio.sleep(_LOOK_EVERY_S)

    def _say_what_is_left(self, status: ReplayStatus, shown: ReplayProgress) -> None:
        """A trainer that has taken its last step trains nothing of it."""
        left = sum(status.states[state] for state in (*_UNSCORED, *_UNTRAINED))
        if left:
            shown.say(
                f"{left} turns are left: the trainer has taken its last step "
                f"(trainer.max_steps = {self._config.trainer.max_steps})"
            )

    async def _until_rest(self, store: Store, processes: Run, shown: ReplayProgress) -> None:
        """Wait until no hint is practised any more, training was stopped, or nothing changes."""
        seen: object = None
        moved = time.monotonic()
        while read_stop(self._folder) is None:
            status, version = await store.replay_status(), await _num_updates(store)
            num_open, num_over = await _num_in_practice(store)
            shown.training(status, version)
            shown.practising(num_over, num_open + num_over)
            if processes.supervisor.failed.done():
                processes.supervisor.failed.result()
            if not num_open or processes.supervisor.has_finished("trainer"):
                return
            now = (version, num_open, await store.lesson_counts())
            if now != seen:
                seen, moved = now, time.monotonic()
            still_s = time.monotonic() - moved
            if still_s > (_STILL_AT_WORK_S if self._is_at_work() else _STILL_S):
                shown.say(
                    f"{num_open} hints wait for more recorded requests to which they apply: "
                    f"nothing has changed for {still_s:.0f} s"
                )
                return
            await asyncio.sleep(_LOOK_EVERY_S)

    def _is_at_work(self) -> bool:
        """Whether judge or engines have answered for hints recently."""
        since = seconds_since(self._folder)
        return since is not None and since < _STILL_S

    async def _has_work(self, store: Store) -> bool:
        """Whether anything waits for a process of the run."""
        status = await store.replay_status()
        trains = self._mode != "judge-only" and not _is_trained(status)
        if trains or not _is_scored(self._mode)(status):
            return True
        return self._rehearses and (await _num_in_practice(store))[0] > 0

    async def _gaps(
        self, store: Store, shown: ReplayProgress
    ) -> dict[str, dict[str, list[CaseGap]]]:
        """The gaps on held-out and on trained turns, of the start weights and the newest."""
        begun = time.monotonic()
        latest = await store.latest_version()
        weights = {"before": self._config.model}
        if latest is not None and latest.version > 0:
            weights["after"] = str(self._folder / latest.checkpoint)
        groups = {
            "held_out": await gap_cases(store, await store.held_out_turns()),
            "trained": await gap_cases(store, await store.trained_recordings()),
        }
        shown.measuring(len(weights) * sum(map(len, groups.values())))
        gaps: dict[str, dict[str, list[CaseGap]]] = {}
        for name, cases in groups.items():
            if not cases:
                continue
            gaps[name] = {}
            for when, path in weights.items():
                gaps[name][when] = await self._gap(path, cases, shown)
                fail_points.reach("gap.measured")
        self._timings["measuring the gap"] = time.monotonic() - begun
        return gaps

    def _say(self, markup: str) -> None:
        self._console.print(markup, soft_wrap=True, highlight=False)

    async def _gap(
        self, student: str, cases: Sequence[HintedCase], shown: ReplayProgress
    ) -> list[CaseGap]:
        from opd.evaluation.gap import measure_gap

        is_stopped = threading.Event()

        def measured() -> None:
            # A thread cannot be cancelled; one that goes on would delay the end for minutes.
            if is_stopped.is_set():
                raise InterruptedError
            shown.measured()

        try:
            return await asyncio.to_thread(
                measure_gap, student, self._config.model, cases, on_case=measured
            )
        finally:
            is_stopped.set()

    def _check_learned(self, status: ReplayStatus, num_updates: int) -> None:
        if self._mode == "judge-only":
            if not status.num_judged:
                raise NothingLearned("no recorded turn was judged: see the counts above")
        elif not status.num_trained and not num_updates:
            raise NothingLearned(
                "no recorded turn could be trained on: see what became of them above, and in "
                f"{self._folder / 'import_problems.jsonl'}"
            )


def _is_scored(mode: ReplayMode) -> Callable[[ReplayStatus], bool]:
    waiting = (TurnState.JUDGING,) if mode == "judge-only" else _UNSCORED
    return lambda status: not any(status.states[state] for state in waiting)


def _is_trained(status: ReplayStatus) -> bool:
    return not any(status.states[state] for state in _UNTRAINED)


async def _num_in_practice(store: Store) -> tuple[int, int]:
    """Hints that are to be examined or practised, and those that were practised."""
    counts = await store.hint_counts()
    over = (HintStatus.RESTING, HintStatus.STUCK)
    return (
        counts.get((HintStatus.ACTIVE, None), 0),
        sum(number for (status, _), number in counts.items() if status in over),
    )


async def _num_updates(store: Store) -> int:
    latest = await store.latest_version()
    return latest.version if latest is not None else 0


async def gap_cases(store: Store, turn_ids: Sequence[str]) -> list[HintedCase]:
    """At most GAP_TURNS of these turns, evenly spread, with their hinted prompts; those of a
    session together.
    """
    from opd.evaluation.gap import HintedCase

    step = max(1, -(-len(turn_ids) // GAP_TURNS))
    cases = []
    for turn_id in turn_ids[::step]:
        score = await store.score_of(turn_id)
        if score is None:
            continue
        turn = await store.turn(turn_id)
        if turn is None or not len(turn.response_ids):
            continue
        cases.append(
            HintedCase(
                session=turn.session_id,
                prompt_ids=turn.prompt_ids,
                hinted_prompt_ids=score.hinted_prompt_ids,
                response_ids=turn.response_ids,
            )
        )
    return cases
