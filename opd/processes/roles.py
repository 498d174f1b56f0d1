"""What each process of a run does: read the configuration, connect its parts, run until told to
stop.

One function a process. A process holds nothing that matters: it can be killed at any instruction
and started again with the same arguments. Started by hand, it checks first what a command has
checked that starts it as a child.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.commands.keys import refuse_open_door
from opd.models.folder import check_model
from opd.processes.beginning import begin, run_until_stopped
from opd.processes.judge import judge_config, judge_control_texts, judge_counter
from opd.rehearsal.saying import LearningLine
from opd.report.at_work import LINE_EVERY_S
from opd.report.held import held_line
from opd.report.status import status_line
from opd.run.checks import run_warnings
from opd.run.config import EngineConfig, RunConfig
from opd.run.devices import check_device
from opd.run.start_checks import check_canaries, check_listening, check_spill, check_store
from records.queue.freshness import Freshness
from records.store import Store
from trainer.errors import ConfigError
from trainer.model.model_config import model_vocab_size

if TYPE_CHECKING:
    from judge.hints.metrics import QuestionMetrics
    from judge.votes.context import Reads
    from opd.guard.metrics import GuardMetrics
    from rollout_bridge.engine.client import EngineClient
    from rollout_bridge.engine.served import ServedFile
    from rollout_bridge.rendering.rendering import Rendering
    from rollout_bridge.scoring.scoring import Resampler, RewriteHint
    from trainer.config import TrainerConfig
    from trainer.step.loop import EmbeddedTrainer
    from trainer.step.report import StepReport

logger = logging.getLogger(__name__)


def run_proxy(config_file: Path, overrides: list[str], exit_with_parent: bool) -> None:
    """The OpenAI-compatible endpoint."""
    config = begin(config_file, overrides, exit_with_parent)
    if not exit_with_parent:
        check_listening("proxy", config.proxy.host, config.proxy.port)
        check_store(config.store)
    check_spill(config.store)
    from api_proxy.server.event_loop import run

    run(_serve_proxy(config, config_file))


async def _serve_proxy(config: RunConfig, config_file: Path) -> None:
    from api_proxy.app import ProxyDeps, create_app
    from api_proxy.server.server import ProxyServer
    from opd.report.curves import training_curves
    from opd.report.hint_versions import hint_versions
    from opd.report.metrics_file import FOLDER
    from opd.status.command import with_health
    from opd.status.facts import read_now
    from rollout_bridge.engine.hold_file import HoldFile
    from trainer.step.stop_order import why_stopped

    async with await Store.open(config.store) as store:
        await refuse_open_door(config, store, config_file)
        rendering = _rendering(config)

        async def run_status() -> dict[str, Any]:
            return with_health(await read_now(config, config_file.parent, store))

        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(_policy_client(config, config_file.parent))
            teacher = _asked_by_pages(config)
            if teacher is not None:
                await stack.enter_async_context(teacher)
            deps = ProxyDeps(
                store=store,
                engine=client,
                rendering=rendering,
                config=config.proxy,
                pause_mode=config.trainer.pause_mode,
                metrics_folder=config_file.parent / FOLDER,
                hold=HoldFile(config_file.parent) if config.trainer.holds_generation else None,
                waiting=config.waiting,
                hint_versions=partial(hint_versions, config_file.parent),
                teacher=teacher,
                run_status=run_status,
                curves=partial(training_curves, config_file.parent),
                why_stopped=partial(why_stopped, config_file.parent),
            )
            await ProxyServer(create_app(deps), config.proxy).serve()


def _asked_by_pages(config: RunConfig) -> EngineClient | None:
    """The teacher; None for an endpoint that stands alone, without an engine for it."""
    from rollout_bridge.engine.types import BACKGROUND_PRIORITY

    if not config.frozen.is_set:
        return None
    try:
        return _client(config, config.frozen, priority=BACKGROUND_PRIORITY)
    except ConfigError as error:
        logger.warning("pages cannot ask the teacher: %s", error)
        return None


def run_judge(
    config_file: Path,
    overrides: list[str],
    exit_with_parent: bool,
    rewrite_hint: RewriteHint | None = None,
) -> None:
    """The judge worker and the scoring worker, and what keeps and practises hints.

    `rewrite_hint` is for controls.
    """
    config = begin(config_file, overrides, exit_with_parent)
    if not exit_with_parent:
        check_store(config.store)
        check_canaries(config.guard)
    run_until_stopped(
        lambda stop: _with_status(
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
    from opd.report.metrics_file import keep_written
    from opd.report.run_figures import RunCollector
    from rollout_bridge.engine.types import BACKGROUND_PRIORITY
    from rollout_bridge.scoring.policy_scores import PolicyScorer
    from rollout_bridge.scoring.scoring import ScoringWorker

    rendering = _rendering(config)
    store = await Store.open(config.store)
    teacher = _client(config, config.frozen, priority=BACKGROUND_PRIORITY)
    policy = _policy_client(config, folder, priority=BACKGROUND_PRIORITY)
    async with store, teacher, policy:
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
            freshness=freshness_of(config),
        )
        questions, guard_metrics = QuestionMetrics(), GuardMetrics()
        registries = [one.registry for one in (judge.metrics, scoring.metrics, questions)]
        async with asyncio.TaskGroup() as group:
            run_figures = RunCollector(store, folder)
            group.create_task(judge.run(stop))
            if config.replay.mode != "judge-only":
                group.create_task(scoring.run(stop))
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
    the canaries, as far as the run does either.
    """
    from judge.hints.examiner import HintExaminer
    from judge.hints.questions import HintQuestions
    from judge.votes.calls import judge_client
    from opd.guard.starting import guard_worker
    from opd.rehearsal.heartbeat import Heartbeat
    from opd.rehearsal.starting import Connections, rehearsal_worker, source_check
    from rollout_bridge.engine.types import LESSON_PRIORITY

    asked = judge_config(config)
    async with (
        judge_client(asked) as client,
        _policy_client(config, folder, priority=LESSON_PRIORITY) as policy,
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


def freshness_of(config: RunConfig) -> Freshness | None:
    """How old live turns may be to be judged and scored; None where nothing trains on them. Where
    hints are practised a step takes no more of them than its hinted places.
    """
    if config.replay.mode == "judge-only":
        return None
    size = config.trainer.turns_per_step(with_lessons=config.rehearsal.enabled)
    return Freshness(max_staleness=config.trainer.staleness_bound, batch_size=size)


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


async def _with_status(
    config: RunConfig, folder: Path, is_child: bool, work: Coroutine[Any, Any, None]
) -> None:
    """Do the work, with lines a minute on where turns and hints stand; of a child its parent says
    them.
    """
    if is_child:
        await work
        return
    async with await Store.open(config.store) as store:
        learning = LearningLine(store, folder)

        async def say() -> None:
            while True:
                await asyncio.sleep(LINE_EVERY_S)
                logger.info("%s", await status_line(store))
                if (held := held_line(folder)) is not None:
                    logger.info("%s", held)
                if (said := await learning.said()) is not None:
                    logger.info("%s", said)

        saying = asyncio.create_task(say())
        try:
            await work
        finally:
            saying.cancel()
            await asyncio.gather(saying, return_exceptions=True)


def run_trainer(config_file: Path, overrides: list[str], exit_with_parent: bool) -> None:
    """The embedded trainer: calibrates, then trains whenever a batch is full."""
    config = begin(config_file, overrides, exit_with_parent)
    if not exit_with_parent:
        check_device("trainer.device", config.trainer.device)
        check_model(config.model)
        check_store(config.store)
    run_until_stopped(
        lambda stop: _with_status(
            config,
            config_file.parent,
            exit_with_parent,
            _train(config, config_file.parent, stop, stays=exit_with_parent),
        )
    )


async def _train(config: RunConfig, folder: Path, stop: asyncio.Event, *, stays: bool) -> None:
    """Train until told to."""
    from opd.report.metrics_file import writing_metrics
    from opd.report.run_report import write_run_report
    from opd.report.trainer_metrics import TrainerMetrics
    from opd.run.folder import only_trainer
    from trainer.step.calibration_texts import calibration_sequences
    from trainer.step.loop import EmbeddedTrainer

    for warning in run_warnings(config.trainer):
        logger.warning("%s", warning)
    rendering = _rendering(config)
    store = await Store.open(config.store)
    policy = _policy_client(config, folder)
    frozen = _client(config, config.frozen)
    async with store, policy, frozen, only_trainer(folder):
        await _check_teachers(config, rendering)
        trainer = await EmbeddedTrainer.open(
            store=store,
            config=_trainer_config(config),
            run_folder=folder,
            model=config.model,
            engines={"policy": policy},
            owner=owner_name("trainer"),
            rehearsal=config.rehearsal if config.rehearsal.enabled else None,
            guarded=config.guard.is_on,
        )
        try:
            sequences = calibration_sequences(
                rendering, config.seed, model_vocab_size(config.model)
            )
            calibration = await trainer.calibrate(sequences, frozen={"frozen": frozen})
            logger.info("calibrated: noise %.3g nats", calibration.noise)
            serves = stays and config.made_by == "serve"
            metrics = TrainerMetrics()
            with writing_metrics(folder, "trainer", [metrics.registry]):
                await train_and_serve(
                    trainer, stop, stays=stays, when_done=serves, on_step=metrics.count
                )
        finally:
            await trainer.close()
            # A lab's or a replay's summary and report are their own; serve writes its own as well.
            if not stays and config.made_by in (None, "serve"):
                path = await write_run_report(folder, f"Training {config.model}", store, rendering)
                logger.info("report: %s", path)


def _trainer_config(config: RunConfig) -> TrainerConfig:
    """An engine that is judge and teacher too must keep its base: adapters are no option there."""
    publish = "adapter" if config.frozen.shared else config.trainer.publish
    return config.trainer.model_copy(update={"publish": publish})


async def train_and_serve(
    trainer: EmbeddedTrainer,
    stop: asyncio.Event,
    *,
    stays: bool,
    when_done: bool,
    on_step: Callable[[StepReport], None] | None = None,
) -> None:
    """Train until told to. One that `stays` when RUN/stop ends training goes on once that file is
    deleted: whoever started it would take its end for a failure. Meanwhile, and `when_done` also
    after its last step, it keeps the engines at the version that is to serve.
    """

    def took(step: StepReport) -> None:
        logger.info("step: %s", step.version)
        if on_step is not None:
            on_step(step)

    while not stop.is_set():
        await trainer.run(stop, on_step=took)
        if not stays or not trainer.is_at_rest(when_done=when_done):
            return
        await trainer.serve_on(stop, when_done=when_done)


async def _check_teachers(config: RunConfig, rendering: Rendering) -> None:
    """Further teachers must read the policy's tokens as the policy does."""
    from opd.models.compatibility import check_teacher
    from trainer.step.calibration_texts import conversation_sequences

    for name, url in config.scoring.teachers.items():
        teacher = EngineConfig(url=url, api_key=config.scoring.teacher_api_keys.get(name))
        async with _client(config, teacher) as engine:
            differences = await check_teacher(
                name,
                engine,
                model=config.model,
                # A tokenizer may name ids that its model has no rows for (Gemma 3's image), and a
                # model may have rows that no text uses.
                vocab_size=min(rendering.vocab_size, model_vocab_size(config.model)),
                sequences=conversation_sequences(rendering),
                template_ids=sorted(rendering.stop_token_ids),
                allow=config.scoring.allow_incompatible_teachers,
            )
        for difference in differences:
            logger.warning("teacher %s: %s", name, difference)


def _rendering(config: RunConfig) -> Rendering:
    from rollout_bridge.rendering.rendering import Rendering

    return Rendering.load(config.model, config.renderer)


def _policy_client(config: RunConfig, folder: Path, *, priority: int = 0) -> EngineClient:
    """The policy's engine, asked for the version that the run in `folder` serves."""
    from rollout_bridge.engine.served import ServedFile

    return _client(config, config.policy, ServedFile(folder), priority=priority)


def _client(
    config: RunConfig,
    engine: EngineConfig,
    served: ServedFile | None = None,
    *,
    priority: int = 0,
) -> EngineClient:
    from rollout_bridge.engine.client import EngineClient

    return EngineClient(
        engine.base_url,
        config=config.engine_client,
        vocab_size=model_vocab_size(config.model),
        keys=engine.keys,
        priority=priority,
        served=served,
    )


def owner_name(worker: str) -> str:
    """Name under which this process claims turns: unique, and readable in the store."""
    return f"{worker}@{socket.gethostname()}:{os.getpid()}"
