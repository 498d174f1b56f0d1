"""From a checkpoint to a model, a reference and an optimiser that continue where it was written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import ParamSpec, TypeVar

import torch

from trainer.checkpoint import Checkpoints
from trainer.config import TrainerConfig
from trainer.manifest import Manifest
from trainer.objectives.registry import Need, select_objective
from trainer.policy import Policy, WithoutAdapters
from trainer.token_states import LogprobModel
from trainer.update import Updater

P = ParamSpec("P")
T = TypeVar("T")

# What this trainer's samples bring along.
PROVIDED: frozenset[Need] = frozenset({"teacher_scalar"})


def restore(config: TrainerConfig, checkpoints: Checkpoints, manifest: Manifest) -> Updater:
    """The updater as it was when `manifest` was written, or new for version 0.

    Raises StartupError for an unsupported model, ObjectiveNeedsError for unmet needs.
    """
    objective = select_objective(config.objective, PROVIDED)
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    policy = _load_policy(config, checkpoints, manifest)
    reference: LogprobModel | None = None
    if config.beta_kl > 0:
        adapters = config.lora is not None
        reference = WithoutAdapters(policy) if adapters else load_start(config, checkpoints)
    updater = Updater(policy, reference, objective, config)
    checkpoints.load(manifest, policy, updater.optimizer)
    return updater


def start_model(config: TrainerConfig, checkpoints: Checkpoints, updater: Updater) -> LogprobModel:
    """The frozen start weights, loaded again only where nothing holds them."""
    if updater.reference is not None:
        return updater.reference
    if config.lora is not None:
        return WithoutAdapters(updater.policy)
    return load_start(config, checkpoints)


def load_start(config: TrainerConfig, checkpoints: Checkpoints) -> Policy:
    """The start weights, frozen."""
    return Policy.load(
        checkpoints.model,
        device=config.device,
        dtype=config.dtype,
        chunk_tokens=config.logprob_chunk_tokens,
    ).freeze()


def _load_policy(config: TrainerConfig, checkpoints: Checkpoints, manifest: Manifest) -> Policy:
    # With adapters the base is always the start; the checkpoint's adapters are loaded after.
    path = checkpoints.model if config.lora is not None else checkpoints.weights_path(manifest)
    return Policy.load(
        path,
        device=config.device,
        dtype=config.dtype,
        chunk_tokens=config.logprob_chunk_tokens,
        lora=config.lora,
        seed=config.seed,
    )


async def in_thread(
    thread: Executor, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Run on the one thread that touches models; the event loop goes on meanwhile."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(thread, lambda: function(*args, **kwargs))
