"""The process of the embedded trainer: calibrates, then trains whenever a batch is full.

Started by hand, it first checks what a command has checked that starts it as a child.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from opd.models.folder import check_model
from opd.processes.beginning import begin, imported, run_until_stopped
from opd.processes.shared import client_of, owner_name, policy_client, rendering_of, with_status
from opd.run.checks import run_warnings
from opd.run.config import RunConfig
from opd.run.devices import check_device
from opd.run.start_checks import check_store, check_traces
from records.store import Store
from rollout_bridge import tracing
from trainer.model.model_config import model_vocab_size

if TYPE_CHECKING:
    from rollout_bridge.engine.client import EngineClient
    from trainer.batch.side_sampling import NamedScorers
    from trainer.config import TrainerConfig
    from trainer.step.loop import EmbeddedTrainer
    from trainer.step.report import StepReport

logger = logging.getLogger(__name__)


def run_trainer(config_file: Path, overrides: list[str], exit_with_parent: bool) -> None:
    """The embedded trainer: calibrates, then trains whenever a batch is full."""
    config = begin(config_file, overrides, exit_with_parent)
    if not exit_with_parent:
        check_device("trainer.device", config.trainer.device)
        check_model(config.model)
        check_store(config.store)
        check_traces()
    with tracing.sending("trainer"):
        run_until_stopped(
            lambda stop: with_status(
                config,
                config_file.parent,
                exit_with_parent,
                _train(config, config_file.parent, stop, stays=exit_with_parent),
            )
        )


async def _train(config: RunConfig, folder: Path, stop: asyncio.Event, *, stays: bool) -> None:
    """Train until told to."""
    from opd.report.metrics.metrics_file import writing_metrics
    from opd.report.metrics.trainer_metrics import TrainerMetrics
    from opd.report.run_report import write_run_report
    from opd.run.folder import only_trainer
    from rollout_bridge.engine.types import AGENT_PRIORITY, FIRST_PRIORITY
    from rollout_bridge.rendering.calibration_texts import (
        calibration_sequences,
        conversation_sequences,
    )
    from trainer.step.loop import EmbeddedTrainer

    imported()
    for warning in run_warnings(config.trainer):
        logger.warning("%s", warning)
    rendering = rendering_of(config)
    store = await Store.open(config.store)
    # Traffic of any size leaves calibration its few requests.
    policy = policy_client(config, folder, priority=FIRST_PRIORITY)
    frozen = client_of(config, config.frozen, priority=FIRST_PRIORITY)
    own = frozen.at(AGENT_PRIORITY)
    async with (
        store,
        policy,
        frozen,
        only_trainer(folder),
        _engine_teachers(config, own) as teachers,
    ):
        trainer = await EmbeddedTrainer.open(
            store=store,
            config=_trainer_config(config),
            run_folder=folder,
            model=config.model,
            engines={"policy": policy},
            owner=owner_name("trainer"),
            rehearsal=config.rehearsal if config.rehearsal.enabled else None,
            guarded=config.guard.is_on,
            teachers=teachers,
        )
        try:
            sequences = calibration_sequences(
                rendering, config.seed, model_vocab_size(config.model)
            )
            calibration = await trainer.calibrate(sequences, frozen={"frozen": frozen})
            logger.info("calibrated: noise %.3g nats", calibration.noise)
            await trainer.check_rate(conversation_sequences(rendering))
            serves = stays and config.made_by == "serve"
            metrics = TrainerMetrics()
            with writing_metrics(folder, "trainer", [metrics.registry]):
                await train_and_serve(
                    trainer, stop, stays=stays, when_done=serves, on_step=metrics.count
                )
        finally:
            await trainer.close()
            # The lab, a replay and serve write their own summary and report.
            if not stays and config.made_by in (None, "serve"):
                path = await write_run_report(folder, f"Training {config.model}", store, rendering)
                logger.info("report: %s", path)


@asynccontextmanager
async def _engine_teachers(
    config: RunConfig, own: EngineClient
) -> AsyncGenerator[NamedScorers | None]:
    """Who scores side samples; None where the trainer does, or where there are none."""
    if config.trainer.teacher.in_trainer or config.trainer.side_source is None:
        yield None
        return
    from rollout_bridge.scoring.teachers import Teachers

    teachers = Teachers(own, config.scoring)
    try:
        yield teachers.of
    finally:
        await teachers.close()


def _trainer_config(config: RunConfig) -> TrainerConfig:
    """An engine that is also judge and teacher must keep its base, so it needs adapters."""
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
    """Train until told to stop. One that `stays` when RUN/stop ends training continues once that
    file is deleted, because its parent would take its end for a failure. Meanwhile, and with
    `when_done` also after its last step, it keeps the engines at the version to serve.
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
