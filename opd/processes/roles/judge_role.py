"""The process of the judge: votes, teacher scores, the verifier, and the upkeep and practice of
hints.

Started by hand, it first checks what a command has checked that starts it as a child.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from opd.processes.beginning import begin, imported, run_until_stopped
from opd.processes.roles.judge import judge_config, judge_control_texts, judge_counter
from opd.processes.roles.teacher_check import check_teachers
from opd.processes.shared import client_of, owner_name, policy_client, rendering_of, with_status
from opd.run.config import RunConfig
from opd.run.start_checks import check_canaries, check_store, check_traces, check_verifier
from records.queue.freshness import Freshness
from records.store import Store
from rollout_bridge import tracing
from trainer.model.model_config import model_vocab_size

if TYPE_CHECKING:
    from judge.hints.metrics import QuestionMetrics
    from judge.verifier.worker import VerifierWorker
    from judge.votes.context import Reads
    from opd.guard.metrics import GuardMetrics
    from rollout_bridge.engine.client import EngineClient
    from rollout_bridge.rendering.rendering import Rendering
    from rollout_bridge.scoring.scoring import Resampler, RewriteHint
    from rollout_bridge.scoring.side_samples import SideSampler


def run_judge(
    config_file: Path,
    overrides: list[str],
    exit_with_parent: bool,
    rewrite_hint: RewriteHint | None = None,
) -> None:
    """Run the judge worker, the scoring worker, and the workers that examine and practise hints.

    `rewrite_hint` is for controls.
    """
    config = begin(config_file, overrides, exit_with_parent)
    if not exit_with_parent:
        check_store(config.store)
        check_traces()
        check_canaries(config.guard)
        check_verifier(config.verifier)
    with tracing.sending("judge"):
        run_until_stopped(
            lambda stop: with_status(
                config,
                config_file.parent,
                exit_with_parent,
                _judge_and_score(config, config_file.parent, stop, rewrite_hint),
            )
        )


async def _judge_and_score(
    config: RunConfig, folder: Path, stop: asyncio.Event, rewrite_hint: RewriteHint | None
) -> None:
    from judge.hints.metrics import QuestionMetrics
    from judge.worker import JudgeWorker
    from opd.guard.metrics import GuardMetrics
    from opd.report.metrics.metrics_file import keep_written
    from opd.report.metrics.run_figures import RunCollector
    from rollout_bridge.engine.types import BACKGROUND_PRIORITY
    from rollout_bridge.scoring.policy_scores import PolicyScorer
    from rollout_bridge.scoring.scoring import ScoringWorker

    imported()
    rendering = rendering_of(config)
    store = await Store.open(config.store)
    teacher = client_of(config, config.frozen, priority=BACKGROUND_PRIORITY)
    policy = policy_client(config, folder, priority=BACKGROUND_PRIORITY)
    async with store, teacher, policy:
        if config.replay.mode != "judge-only":
            await check_teachers(config, rendering, config.scoring.teachers)
        reads: Reads = {
            "count_tokens": judge_counter(config, rendering),
            "control_texts": judge_control_texts(config, rendering),
        }
        judge = JudgeWorker(
            store,
            judge_config(config),
            owner_name("judge"),
            freshness=freshness_of(config),
            **reads,
        )
        scoring = ScoringWorker(
            store,
            teacher,
            rendering,
            config.scoring,
            owner_name("scoring"),
            rewrite_hint=rewrite_hint,
            policy=PolicyScorer(policy),
            resampler=_resampler(config, store, policy, rendering),
            side_sampler=side_sampler_of(config, policy),
            freshness=freshness_of(config),
        )
        questions, guard_metrics = QuestionMetrics(), GuardMetrics()
        registries = [one.registry for one in (judge.metrics, scoring.metrics, questions)]
        async with asyncio.TaskGroup() as group:
            run_figures = RunCollector(store, folder)
            group.create_task(judge.run(stop))
            if config.replay.mode != "judge-only":
                group.create_task(scoring.run(stop))
            verifier = _verifier(config, store, policy, rendering)
            if verifier is not None:
                registries.append(verifier.metrics.registry)
                group.create_task(verifier.run(stop))
            if config.guard.is_on:
                registries.append(guard_metrics.registry)
            if config.guard.is_on or config.rehearsal.enabled:
                group.create_task(
                    _practise_and_guard(
                        config,
                        folder,
                        stop,
                        store,
                        teacher,
                        rendering,
                        reads,
                        questions,
                        guard_metrics,
                    )
                )
            group.create_task(keep_written(folder, "judge", registries, run_figures, stop))


async def _practise_and_guard(
    config: RunConfig,
    folder: Path,
    stop: asyncio.Event,
    store: Store,
    teacher: EngineClient,
    rendering: Rendering,
    reads: Reads,
    metrics: QuestionMetrics,
    guard_metrics: GuardMetrics,
) -> None:
    """Until `stop`: examine new hints and practise those that are rules, and check each version on
    the canaries, if the run does these.
    """
    from judge.hints.examiner import HintExaminer
    from judge.hints.questions import HintQuestions
    from judge.votes.calls import judge_client
    from opd.guard.starting import guard_worker
    from opd.rehearsal.heartbeat import Heartbeat
    from opd.rehearsal.starting import Connections, rehearsal_worker, source_check
    from rollout_bridge.engine.types import FIRST_PRIORITY

    asked = judge_config(config)
    async with (
        judge_client(asked) as client,
        policy_client(config, folder, priority=FIRST_PRIORITY) as policy,
        asyncio.TaskGroup() as group,
    ):
        questions = HintQuestions(
            client, asked, metrics=metrics, on_answer=Heartbeat(folder), **reads
        )
        to = Connections(
            store=store, questions=questions, policy=policy, frozen=teacher, rendering=rendering
        )
        if config.guard.is_on:
            guard = guard_worker(config, to, folder=folder, metrics=guard_metrics)
            group.create_task(guard.run(stop))
        if not config.rehearsal.enabled:
            return
        examiner = HintExaminer(
            store, questions, asked, owner_name("examiner"), check=source_check(config, to)
        )
        rehearsal = rehearsal_worker(config, to, folder=folder, owner=owner_name("rehearsal"))
        group.create_task(examiner.loop.run(stop))
        group.create_task(rehearsal.run(stop))


def _verifier(
    config: RunConfig, store: Store, policy: EngineClient, rendering: Rendering
) -> VerifierWorker | None:
    """What asks the verifier; None if there is none. `policy` answers prompts again for it."""
    if config.verifier.source is None:
        return None
    from judge.verifier.worker import VerifierWorker
    from opd.processes.roles.continuing import PolicyContinues
    from opd.rehearsal.policy_sampler import PolicySampler

    sampler = PolicySampler(
        policy,
        rendering,
        temperature=config.rehearsal.temperature,
        max_new_tokens=config.rehearsal.max_new_tokens,
        context_length=config.scoring.context_length,
        pause_mode=config.trainer.pause_mode,
        proxy=config.proxy,
    )
    return VerifierWorker(store, config.verifier, owner_name("verifier"), PolicyContinues(sampler))


def freshness_of(config: RunConfig) -> Freshness | None:
    """How old live turns may be to be judged and scored; None if nothing trains on them. If hints
    are practised, a step takes no more live turns than it has hinted places.
    """
    if config.replay.mode == "judge-only":
        return None
    size = config.trainer.turns_per_step(with_lessons=config.rehearsal.enabled)
    return Freshness(max_staleness=config.trainer.staleness_bound, batch_size=size)


def side_sampler_of(config: RunConfig, policy: EngineClient) -> SideSampler | None:
    """What makes side samples here; None where the trainer draws them, or where there are none."""
    source = config.trainer.side_source
    if config.cluster is None or source is None:
        return None
    from rollout_bridge.scoring.side_samples import SideSampler

    return SideSampler(
        policy,
        source,
        config.trainer.objective.support_size,
        vocab_size=model_vocab_size(config.model),
    )


def _resampler(
    config: RunConfig, store: Store, policy: EngineClient, rendering: Rendering
) -> Resampler | None:
    if config.replay.mode != "resample":
        return None
    from opd.replay.importing import SCOPE
    from opd.replay.resampling import PolicyResampler

    return PolicyResampler(
        store,
        policy,
        rendering,
        config.replay,
        scope=SCOPE,
        batch_size=config.trainer.rollout_batch_size,
        context_length=config.scoring.context_length,
        pause_mode=config.trainer.pause_mode,
        proxy=config.proxy,
    )
