"""Which GPU does what. Pure: numbers in, placements or a refusal out.

slime sorts the GPUs of the job by node and index, gives the first to the trainer and the following
to the engines in the order of its SGLang file. This module makes the same calculation beforehand,
so that a layout that cannot work is refused before anything starts:

    GPU    0 1 2 3   4 5     6 7
           trainer   policy  frozen
"""

from __future__ import annotations

from dataclasses import dataclass

from opd.cluster.architecture import Architecture
from opd.cluster.config import ClusterConfig, EngineGroup
from trainer.errors import StartupError


class LayoutError(StartupError):
    """The layout does not add up; one line per problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlacement:
    """One engine: its GPUs are `first_gpu` and those that follow it in the job, all in `node`."""

    node: int
    first_gpu: int
    gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where everything runs. GPUs are counted over all nodes, node by node."""

    nodes: int
    gpus_per_node: int
    actor_gpus: int
    engines: dict[str, tuple[EnginePlacement, ...]]
    """Name of a group ("policy" first) -> its engines."""

    @property
    def rollout_gpus(self) -> int:
        """GPUs of all engines."""
        return self.nodes * self.gpus_per_node - self.actor_gpus

    @property
    def actor_shape(self) -> tuple[int, int]:
        """Nodes of the trainer, and its GPUs on each of them."""
        per_node = min(self.actor_gpus, self.gpus_per_node)
        return self.actor_gpus // per_node, per_node

    def owner(self, gpu: int) -> str:
        """What runs on a GPU: "trainer", or the engine as "policy 0"."""
        if gpu < self.actor_gpus:
            return "trainer"
        for name, engines in self.engines.items():
            for number, engine in enumerate(engines):
                if engine.first_gpu <= gpu < engine.first_gpu + engine.gpus:
                    return f"{name} {number}"
        raise AssertionError(f"GPU {gpu} is not assigned")


def engine_groups(config: ClusterConfig) -> dict[str, EngineGroup]:
    """The groups in slime's order: the one that gets weights comes first."""
    groups: dict[str, EngineGroup] = {"policy": config.policy, "frozen": config.frozen}
    if config.judge is not None:
        groups["judge"] = config.judge
    return groups | {teacher_group(name): group for name, group in config.teachers.items()}


def teacher_group(name: str) -> str:
    """The name of the group of a further teacher's engines."""
    return f"teacher-{name}"


def build_layout(config: ClusterConfig, model: Architecture | None, batch_size: int) -> Layout:
    """Place everything. Raises LayoutError with a line for each thing that does not add up.

    `model` is None if only its flags are known; then its divisors are not checked.
    """
    problems = [
        *_sums(config),
        *_actor(config),
        *_batch(config, batch_size),
        *(_divisors(config, model) if model is not None else []),
    ]
    engines: dict[str, tuple[EnginePlacement, ...]] = {}
    start = config.actor.gpus
    for name, group in engine_groups(config).items():
        engines[name], wrong = _place(name, group, start, config.gpus_per_node)
        problems += wrong
        start += group.gpus
    if problems:
        raise LayoutError("\n".join(problems))
    return Layout(
        nodes=config.nodes,
        gpus_per_node=config.gpus_per_node,
        actor_gpus=config.actor.gpus,
        engines=engines,
    )


def _sums(config: ClusterConfig) -> list[str]:
    parts = {"actor": config.actor.gpus}
    parts |= {name: group.gpus for name, group in engine_groups(config).items()}
    total, used = config.nodes * config.gpus_per_node, sum(parts.values())
    if total == used:
        return []
    shown = " + ".join(f"{name} {gpus}" for name, gpus in parts.items())
    advice = "give them to a group" if used < total else "take them from a group"
    return [
        f"cluster: {shown} = {used} GPUs, but {config.nodes} x {config.gpus_per_node} = {total}: "
        f"{abs(total - used)} {'left over' if used < total else 'too many'}, {advice} or change "
        "nodes or gpus_per_node"
    ]


def _actor(config: ClusterConfig) -> list[str]:
    actor, per_node = config.actor, config.gpus_per_node
    problems = []
    if actor.gpus > per_node and actor.gpus % per_node:
        problems.append(
            f"cluster.actor.gpus {actor.gpus}: more than one node must be filled entirely; use a "
            f"multiple of gpus_per_node {per_node}"
        )
    if actor.gpus % actor.model_parallel:
        problems.append(
            f"cluster.actor.gpus {actor.gpus} is not a multiple of tensor {actor.tensor_parallel} "
            f"x pipeline {actor.pipeline_parallel} x context {actor.context_parallel} = "
            f"{actor.model_parallel}, the GPUs of one copy of the model"
        )
    experts = actor.expert_parallel * actor.expert_tensor_parallel * actor.pipeline_parallel
    if actor.gpus % experts:
        problems.append(
            f"cluster.actor.gpus {actor.gpus} is not a multiple of expert {actor.expert_parallel} "
            f"x expert tensor {actor.expert_tensor_parallel} x pipeline {actor.pipeline_parallel} "
            f"= {experts}"
        )
    if per_node % actor.tensor_parallel:
        problems.append(
            f"cluster.actor.tensor_parallel {actor.tensor_parallel} does not divide gpus_per_node "
            f"{per_node}: the GPUs that share a layer would be in two nodes"
        )
    return problems


def _batch(config: ClusterConfig, batch_size: int) -> list[str]:
    copies = config.actor.data_parallel
    if batch_size >= copies:
        return []
    return [
        f"trainer.rollout_batch_size {batch_size} is less than the {copies} copies of the model: "
        "each needs a turn in every step"
    ]


def _divisors(config: ClusterConfig, model: Architecture) -> list[str]:
    actor = config.actor
    checks = [
        ("actor.tensor_parallel", actor.tensor_parallel, "attention heads", "num_attention_heads"),
        ("actor.tensor_parallel", actor.tensor_parallel, "key-value heads", "num_key_value_heads"),
        ("actor.pipeline_parallel", actor.pipeline_parallel, "layers", "num_hidden_layers"),
    ]
    for name in ("policy", "frozen"):
        size = engine_groups(config)[name].gpus_per_engine
        checks.append((f"{name}.gpus_per_engine", size, "attention heads", "num_attention_heads"))
    if model.is_moe:
        checks.append(("actor.expert_parallel", actor.expert_parallel, "experts", "num_experts"))
    problems = [
        f"cluster.{key} {size} does not divide the model's {getattr(model, field)} {what}"
        for key, size, what, field in checks
        if getattr(model, field) % size
    ]
    if not model.is_moe and (actor.expert_parallel, actor.expert_tensor_parallel) != (1, 1):
        problems.append(
            f"cluster.actor.expert_parallel: {model.model_type} has no experts, leave it at 1"
        )
    return problems


def _place(
    name: str, group: EngineGroup, start: int, per_node: int
) -> tuple[tuple[EnginePlacement, ...], list[str]]:
    size = group.gpus_per_engine
    if group.gpus % size:
        return (), [
            f"cluster.{name}.gpus {group.gpus} is not a multiple of gpus_per_engine {size}: "
            f"{group.gpus % size} would stay idle"
        ]
    engines = tuple(
        EnginePlacement(node=gpu // per_node, first_gpu=gpu, gpus=size)
        for gpu in range(start, start + group.gpus, size)
    )
    split = [engine for engine in engines if engine.first_gpu % per_node + size > per_node]
    if not split:
        return engines, []
    gpu = split[0].first_gpu
    return engines, [
        f"cluster.{name}.gpus_per_engine {size}: the engine on GPUs {gpu} to {gpu + size - 1} "
        f"would be in two nodes of {per_node}; change sizes so that each engine is inside one"
    ]
