"""The two kinds of evaluation: a suite's tasks, and recorded states under the hint.

Starts the engines that it needs and samples each version in turn; the results are numbers, with the
tables and the plot that show them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from api_proxy.pages.measured import Curve
from opd.evaluation import recorded, recorded_results, task_results
from opd.evaluation.asked import EvalOptions
from opd.evaluation.attempts import ServedPolicy, SuiteCounts, count_passes, sample_on
from opd.evaluation.figures.dynamic_n import StoppingRule
from opd.evaluation.figures.estimates import (
    AdaptivePasses,
    compare,
    estimate_adaptive,
    estimate_passes,
)
from opd.evaluation.recorded import State
from opd.evaluation.served import frozen_engine, load, policy_engine
from opd.evaluation.task_results import TaskResults
from opd.evaluation.tasks import TaskSuite
from opd.evaluation.weights import VersionWeights
from opd.processes.roles.teacher_check import check_teachers
from opd.report.page import Table
from opd.report.terminal.progress import ProgressBar
from opd.run.config import RunConfig
from records.store import Store
from records.types import Ids, TurnRecord
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.rendering.rendering import Rendering
from rollout_bridge.scoring.teachers import TeacherChanged, Teachers
from trainer.errors import StartupError


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Results as JSON values, and how they are shown."""

    values: Mapping[str, Any]
    tables: Sequence[Table]
    curves: Sequence[Curve]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One evaluation's parts; `versions` are the one asked for and those compared with; two with
    recorded states.
    """

    options: EvalOptions
    config: RunConfig
    versions: Sequence[VersionWeights]
    rendering: Rendering
    console: Console

    async def tasks(self, suite: TaskSuite, ks: Sequence[int]) -> Measured:
        """Every version on the suite's tasks."""
        options, counts, adaptive = self.options, {}, {}
        async with self._policy_engine() as engine:
            for weights in self._in_order:
                await load(engine, weights, self.options.folder)
                with self._bar(f"{suite.name}, version {weights.version}", "samples") as bar:
                    counts[weights.version] = await count_passes(
                        self._served(engine, weights),
                        suite,
                        samples=options.samples,
                        seed=options.seed,
                        progress=bar.update,
                    )
                if options.max_samples is not None:
                    adaptive[weights.version] = await self._sample_on(
                        engine, weights, suite, counts[weights.version], options.max_samples
                    )
        passes = {
            weights.version: {
                metric: estimate_passes(found, ks, options.seed)
                for metric, found in counts[weights.version].items()
            }
            for weights in self.versions
        }
        own = counts[self.versions[0].version]
        paired = {
            weights.version: {
                metric: compare(own[metric], counts[weights.version][metric], ks, options.seed)
                for metric in own
            }
            for weights in self.versions[1:]
        }
        results = TaskResults(
            passes=passes,
            paired=paired,
            headline=suite.headline,
            samples=options.samples,
            adaptive={weights.version: adaptive[weights.version] for weights in self.versions}
            if adaptive
            else None,
        )
        return Measured(
            values={"tasks": len(suite.tasks), "k": list(ks), **task_results.as_json(results)},
            tables=task_results.tables(results),
            curves=task_results.curves(results),
        )

    async def _sample_on(
        self,
        engine: EngineClient,
        weights: VersionWeights,
        suite: TaskSuite,
        counts: SuiteCounts,
        max_samples: int,
    ) -> dict[str, AdaptivePasses]:
        """The headline metrics after further tries of hard tasks."""
        options = self.options
        rule = StoppingRule(successes=options.until or 1, max_tries=max_samples)
        with self._bar(f"hard tasks, version {weights.version}", "samples") as bar:
            found = await sample_on(
                self._served(engine, weights),
                suite,
                counts,
                rule,
                seed=options.seed,
                progress=bar.update,
            )
        powers = (2**power for power in range(max_samples.bit_length()))
        ks = [k for k in powers if k > options.samples] or [max_samples]
        return {metric: estimate_adaptive(one, ks, options.seed) for metric, one in found.items()}

    async def recorded(self) -> Measured:
        """The two versions at recorded states, judged by the hinted teacher.

        Raises StartupError also if there is no such state.
        """
        turns = await self._hinted_turns()
        scoring = self.config.scoring
        keys = {turn.teacher_key or scoring.default_teacher for turn in turns}
        asked = [name for name in scoring.teachers if name in keys]
        await check_teachers(self.config, self.rendering, asked)
        try:
            async with frozen_engine(
                self.config, self._config_file, self.options.overrides
            ) as frozen:
                teachers = Teachers(frozen, self.config.scoring)
                try:
                    return await self._contests(turns, teachers)
                finally:
                    await teachers.close()
        except TeacherChanged as error:
            raise StartupError(str(error)) from None

    async def _contests(self, turns: Sequence[TurnRecord], teachers: Teachers) -> Measured:
        states, left_out = await recorded.prepare_states(turns, self.rendering, teachers)
        recorded.check_states(states, left_out)
        answers = await self._answers(states)
        scores = []
        for weights, given in zip(self.versions, answers, strict=True):
            with self._bar(f"teacher, version {weights.version}", "answers") as bar:
                scores.append(await recorded.score_states(states, given, bar.update))
        contests = [
            recorded.contest(state.turn, *outcome)
            for state, *outcome in zip(states, *scores, *answers, strict=True)
        ]
        found = recorded.win_rate(contests, left_out, self.options.seed)
        version, against = (weights.version for weights in self.versions)
        return Measured(
            values=recorded_results.as_json(found),
            tables=[recorded_results.table(found, version, against)],
            curves=[recorded_results.curve(found)],
        )

    async def _hinted_turns(self) -> list[TurnRecord]:
        path = self.config.store.sqlite_path
        if path is not None and not path.is_file():
            raise StartupError(f"no database at {path}: this run has recorded nothing yet")
        async with await Store.open(self.config.store) as store:
            return await recorded.hinted_turns(store, self.options.tasks, self.options.seed)

    async def _answers(self, states: Sequence[State]) -> list[list[list[Ids]]]:
        """Answers by version (in the order of `versions`), state and sample."""
        found: dict[int, list[list[Ids]]] = {}
        async with self._policy_engine() as engine:
            for weights in self._in_order:
                await load(engine, weights, self.options.folder)
                with self._bar(f"states, version {weights.version}", "answers") as bar:
                    found[weights.version] = await recorded.sample_states(
                        self._served(engine, weights),
                        states,
                        samples=self.options.samples,
                        seed=self.options.seed,
                        progress=bar.update,
                    )
        return [found[weights.version] for weights in self.versions]

    @property
    def _in_order(self) -> list[VersionWeights]:
        # An engine starts with the start model, which it could not load again from a hub.
        return sorted(self.versions, key=lambda weights: weights.version)

    @property
    def _config_file(self) -> Path:
        return self.options.folder / "config.toml"

    def _policy_engine(self) -> AbstractAsyncContextManager[EngineClient]:
        options = self.options
        return policy_engine(self.config, self._config_file, options.overrides, options.engine_url)

    def _served(self, engine: EngineClient, weights: VersionWeights) -> ServedPolicy:
        return ServedPolicy(
            engine=engine,
            rendering=self.rendering,
            label=weights.label,
            temperature=self.options.temperature,
        )

    def _bar(self, description: str, unit: str) -> ProgressBar:
        return ProgressBar(self.console, description, unit)
