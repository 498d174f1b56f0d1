"""From a checkpoint to a model, a reference and an optimiser that continue where it was written."""

from __future__ import annotations

import torch

from rollout_bridge.embedded.model.products import compute_all_fast
from rollout_bridge.embedded.model.threads import set_threads
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.checkpoints.manifest import Manifest
from trainer.checkpoints.older import OlderPolicies, load_frozen
from trainer.config import TrainerConfig
from trainer.model.heap import keep_large_blocks, map_large_blocks
from trainer.model.model_config import config_value, held_dtype, recomputes
from trainer.model.policy import Policy, WithoutAdapters
from trainer.model.teacher_models import EmaTeacher, StateModel, TrustRegionTeacher
from trainer.model.token_states import LogprobModel
from trainer.step.memory_plan import fitting
from trainer.step.update import Updater


def restore(config: TrainerConfig, checkpoints: Checkpoints, manifest: Manifest) -> Updater:
    """The updater as it was when `manifest` was written, or new for version 0.

    Raises StartupError for an unsupported model, or one that does not fit in `trainer.memory_gb`.
    """
    map_large_blocks()
    torch.manual_seed(config.seed)
    policy = _load_policy(config, checkpoints, manifest)
    if not policy.recomputes and config.memory_gb is None:
        keep_large_blocks()
    set_threads(config.threads, policy.base_model)
    compute_all_fast()
    reference: StateModel | None = None
    if config.needs_start:
        reference = _start(config, checkpoints, policy)
    teacher = _teacher(config, checkpoints, policy, reference)
    config, longest = fitting(config, policy)
    older = None
    if config.asks_sampling_weights:
        older = OlderPolicies(config, checkpoints, policy)
    updater = Updater(policy, reference, config, teacher=teacher, longest=longest, older=older)
    average = teacher if isinstance(teacher, EmaTeacher) else None
    checkpoints.load(manifest, policy, updater.optimizer, average)
    return updater


def go_back(
    config: TrainerConfig, checkpoints: Checkpoints, manifest: Manifest, updater: Updater
) -> None:
    """Load a checkpoint's weights and optimiser into a running updater."""
    if config.lora is None:
        weights = load_frozen(config, checkpoints.weights_path(manifest))
        updater.policy.base_model.load_state_dict(weights.base_model.state_dict())
    average = updater.teacher if isinstance(updater.teacher, EmaTeacher) else None
    checkpoints.load(manifest, updater.policy, updater.optimizer, average)


def _teacher(
    config: TrainerConfig, checkpoints: Checkpoints, policy: Policy, reference: StateModel | None
) -> LogprobModel | None:
    """The model that teaches; the start weights are loaded at most once."""
    kind = config.teacher.kind
    if kind == "engine":
        return None
    if kind == "current":
        return policy
    if kind == "ema":
        return EmaTeacher(policy, config.teacher.ema_rate)
    start = reference if reference is not None else _start(config, checkpoints, policy)
    if kind == "frozen":
        return start
    return TrustRegionTeacher(start, policy, config.teacher.trust_region_alpha)


def _start(config: TrainerConfig, checkpoints: Checkpoints, policy: Policy) -> StateModel:
    if config.lora is not None:
        return WithoutAdapters(policy)
    return load_start(config, checkpoints)


def start_model(config: TrainerConfig, checkpoints: Checkpoints, updater: Updater) -> LogprobModel:
    """The frozen start weights, loaded again only if they are not in memory."""
    if updater.reference is not None:
        return updater.reference
    if config.teacher.kind == "frozen" and updater.teacher is not None:
        return updater.teacher
    if config.lora is not None:
        return WithoutAdapters(updater.policy)
    return load_start(config, checkpoints)


def load_start(config: TrainerConfig, checkpoints: Checkpoints) -> Policy:
    """The start weights, frozen."""
    return load_frozen(config, checkpoints.model, held_dtype(checkpoints.model, config.base_dtype))


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
        base_dtype="float32" if config.lora is None else held_dtype(path, config.base_dtype),
        recompute=recomputes(config, config_value(path, "hidden_size")),
    )
