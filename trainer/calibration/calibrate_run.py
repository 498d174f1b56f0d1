"""A run's calibration before its first step: its engines against the weights that they should have,
then the policy as its own teacher.

What is measured is in calibrate.py and self_check.py; this loads the weights to compare with, sets
the updater's noise, and writes RUN/calibration.json.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from records.types import Ids
from rollout_bridge.embedded.model.threads import in_thread
from trainer.calibration.calibrate import Calibration, Scorer, calibrate, own_logprobs
from trainer.calibration.self_check import self_check
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.checkpoints.older import load_frozen
from trainer.checkpoints.restore import start_model
from trainer.config import TrainerConfig
from trainer.model.heap import give_back
from trainer.model.token_states import LogprobModel
from trainer.publishing.merged import MergedFolders
from trainer.step.update import Updater

logger = logging.getLogger(__name__)

CALIBRATION_FILE = "calibration.json"


async def calibrate_run(
    config: TrainerConfig,
    run_folder: Path,
    checkpoints: Checkpoints,
    updater: Updater,
    sequences: Sequence[Ids],
    *,
    policy_engines: Mapping[str, Scorer],
    start_engines: Mapping[str, Scorer],
    older: int | None,
    thread: ThreadPoolExecutor,
) -> Calibration:
    """Compare engines of the policy, and those at the start weights, with this process. `older` is
    the version that the former serve instead of the newest. Work on weights is done in `thread`.

    Raises CalibrationError for a gap, DistillationOffError if the policy as its own teacher teaches
    something.
    """
    device = updater.policy.device
    served: LogprobModel = updater.policy
    if older is not None:
        served = await in_thread(thread, _weights_of, older, config, checkpoints)
    policy = own_logprobs(served, device)
    pairs: dict[str, tuple[Scorer, Callable[[Ids], np.ndarray]]] = {
        name: (engine, policy) for name, engine in policy_engines.items()
    }
    if start_engines:
        start = await in_thread(thread, start_model, config, checkpoints, updater)
        own = own_logprobs(start, device)
        pairs |= {name: (engine, own) for name, engine in start_engines.items()}
    result = await calibrate(pairs, sequences, bound=config.calibration_bound, thread=thread)
    updater.noise = result.noise
    bound = max(config.calibration_bound, 10 * result.noise)
    worst = await in_thread(thread, self_check, updater, sequences, bound)
    await in_thread(thread, give_back)
    logger.info("teacher = student: largest loss or advantage %.1e nats", worst)
    for warning in result.warnings:
        logger.warning("%s", warning)
    result.save(run_folder / CALIBRATION_FILE)
    return result


def _weights_of(version: int, config: TrainerConfig, checkpoints: Checkpoints) -> LogprobModel:
    """An older version, loaded next to the policy."""
    with tempfile.TemporaryDirectory() as folder:
        path = MergedFolders(Path(folder), checkpoints).path(version)
        assert path is not None, "only what is kept is served"
        return load_frozen(config, path)
