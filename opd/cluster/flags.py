"""The flags of slime's train.py and train_async.py, from the configuration and the layout. Pure.

slime silently ignores unknown flags; `flag_check.py` checks each of these against the installed
parsers.
"""

from __future__ import annotations

from opd.cluster.architecture import Architecture, Flag, megatron_flags
from opd.cluster.going_back import GoingBack
from opd.cluster.hooks import hook_flags, rollout_flags
from opd.cluster.layout import Layout
from opd.cluster.paths import Paths
from opd.cluster.routing import RoutingReplay, routing_replay
from opd.run.config import RunConfig

Sections = dict[str, list[Flag]]
WITHOUT_END = 1_000_000
"""Steps of a run that trains until it is stopped; slime requires a number."""


def slime_flags(
    config: RunConfig,
    layout: Layout,
    model: Architecture | None,
    paths: Paths,
    back: GoingBack | None = None,
) -> Sections:
    """Section title -> flags, in the order of the command line. `back`: the job goes back to an
    older version.
    """
    cluster = config.cluster
    assert cluster is not None
    derived = megatron_flags(model) if model is not None else []
    return {
        "model": [*derived, *_words(cluster.model_flags)],
        "GPUs": _gpu_flags(config, layout),
        "checkpoints": _checkpoint_flags(config, paths, back),
        "samples": _sample_flags(config, model, paths),
        "objective": hook_flags(config.trainer, rehearses=config.rehearsal.enabled),
        "optimiser": _optimiser_flags(config),
        "computation": _computation_flags(config, model),
        "further": _words(cluster.extra_flags),
    }


def command_line(sections: Sections) -> list[str]:
    """All words, in order."""
    return [word for flags in sections.values() for flag in flags for word in flag]


def _words(words: list[str]) -> list[Flag]:
    """A flat list of words, cut before each flag."""
    flags: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not flags:
            flags.append([])
        flags[-1].append(word)
    return [tuple(flag) for flag in flags]


def _gpu_flags(config: RunConfig, layout: Layout) -> list[Flag]:
    cluster = config.cluster
    assert cluster is not None
    nodes, per_node = layout.actor_shape
    actor = cluster.actor
    flags: list[Flag] = [
        ("--actor-num-nodes", str(nodes)),
        ("--actor-num-gpus-per-node", str(per_node)),
        ("--num-gpus-per-node", str(layout.gpus_per_node)),
        ("--rollout-num-gpus", str(layout.rollout_gpus)),
        ("--rollout-num-gpus-per-engine", str(cluster.policy.gpus_per_engine)),
        ("--tensor-model-parallel-size", str(actor.tensor_parallel)),
        ("--pipeline-model-parallel-size", str(actor.pipeline_parallel)),
        ("--context-parallel-size", str(actor.context_parallel)),
        ("--expert-model-parallel-size", str(actor.expert_parallel)),
        ("--expert-tensor-parallel-size", str(actor.expert_tensor_parallel)),
    ]
    # Without it each of the GPUs that share a layer would hold all activations between layers.
    return [*flags, ("--sequence-parallel",)] if actor.tensor_parallel > 1 else flags


def _checkpoint_flags(config: RunConfig, paths: Paths, back: GoingBack | None) -> list[Flag]:
    cluster = config.cluster
    assert cluster is not None
    flags: list[Flag] = [
        ("--hf-checkpoint", config.model),
        # Until there is a checkpoint of this run, training starts from these weights.
        ("--ref-load", cluster.megatron_checkpoint or config.model),
        ("--load", str(paths.checkpoints)),
        ("--save", str(paths.checkpoints)),
        ("--save-interval", str(cluster.save_interval)),
    ]
    if back is not None and back.rollout_id > 0:
        # Megatron takes 0 for no number; Megatron's own file then names the checkpoint. Without the
        # second flag the start weights would be looked for under the same number.
        flags += [("--ckpt-step", str(back.rollout_id)), ("--ref-ckpt-step", "0")]
    if cluster.save_hf:
        flags.append(("--save-hf", str(paths.hf / "{rollout_id}")))
    return flags


def _sample_flags(config: RunConfig, model: Architecture | None, paths: Paths) -> list[Flag]:
    trainer, cluster = config.trainer, config.cluster
    assert cluster is not None
    batch = str(trainer.rollout_batch_size)
    flags: list[Flag] = [
        *rollout_flags(),
        ("--sglang-config", str(paths.sglang_yaml)),
        ("--custom-config-path", str(paths.custom_yaml)),
        ("--num-rollout", str(trainer.max_steps or WITHOUT_END)),
        ("--rollout-batch-size", batch),
        ("--n-samples-per-prompt", "1"),
        ("--global-batch-size", batch),
        ("--rollout-temperature", "1.0"),
        ("--update-weights-interval", "1"),
        # A session's requests go to the engine that has its prefix; the clients send the key.
        ("--router-policy", cluster.router_policy),
    ]
    if trainer.tensorboard:
        flags += [("--use-tensorboard",), ("--tb-project-name", paths.run.name)]
    if trainer.wandb is not None:
        flags += [("--use-wandb",), ("--wandb-project", trainer.wandb)]
        flags += [("--wandb-group", paths.run.name), ("--wandb-dir", str(paths.run))]
    if model is not None and model.is_moe:
        flags += _REPLAY_FLAGS[routing_replay(config)[0]]
    return flags


_REPLAY_FLAGS: dict[RoutingReplay, list[Flag]] = {
    "none": [],
    "R2": [("--use-routing-replay",)],
    "R3": [("--use-rollout-routing-replay",)],
}


def _optimiser_flags(config: RunConfig) -> list[Flag]:
    trainer, cluster = config.trainer, config.cluster
    assert cluster is not None
    beta1, beta2 = trainer.adam_betas
    # slime counts steps, the configuration versions.
    steps = trainer.epochs_per_batch
    flags: list[Flag] = [
        ("--optimizer", "adam"),
        ("--lr", f"{trainer.learning_rate:g}"),
        ("--lr-decay-style", trainer.lr_decay_style),
        ("--lr-warmup-iters", str(trainer.warmup_steps * steps)),
        ("--adam-beta1", f"{beta1:g}"),
        ("--adam-beta2", f"{beta2:g}"),
        ("--adam-eps", f"{trainer.adam_eps:g}"),
        ("--weight-decay", f"{trainer.weight_decay:g}"),
        ("--clip-grad", f"{trainer.grad_clip:g}"),
        # Megatron refuses 0.
        ("--seed", str(trainer.seed + 1)),
    ]
    if trainer.lr_decay_style != "constant":
        assert trainer.max_steps is not None
        flags.append(("--lr-decay-iters", str(trainer.max_steps * steps)))
    if cluster.optimizer_offload:
        flags += [
            ("--optimizer-cpu-offload",),
            ("--overlap-cpu-optimizer-d2h-h2d",),
            ("--use-precision-aware-optimizer",),
        ]
    return flags


def _computation_flags(config: RunConfig, model: Architecture | None) -> list[Flag]:
    trainer, cluster = config.trainer, config.cluster
    assert cluster is not None
    flags: list[Flag] = [
        ("--use-dynamic-batch-size",),
        ("--max-tokens-per-gpu", str(trainer.micro_batch_tokens)),
        ("--log-probs-chunk-size", str(trainer.logprob_chunk_tokens)),
        ("--attention-dropout", "0.0"),
        ("--hidden-dropout", "0.0"),
        ("--accumulate-allreduce-grads-in-fp32",),
        ("--attention-softmax-in-fp32",),
        ("--attention-backend", "flash"),
    ]
    if cluster.recompute:
        flags += [
            ("--recompute-granularity", "full"),
            ("--recompute-method", "uniform"),
            ("--recompute-num-layers", "1"),
        ]
    return flags
