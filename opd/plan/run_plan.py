"""The plan of a whole run: what is loaded where, whether it fits, and what to change if not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from opd.plan.memory import (
    COMMAND,
    ENDPOINT,
    GIB,
    JUDGE,
    MIB,
    Load,
    Part,
    engine_parts,
    server_parts,
    trainer_parts,
)
from opd.plan.shape import ModelShape, shape_of
from opd.run.config import EngineConfig, RunConfig
from trainer.config import HeldDtype, LoraConfig
from trainer.model.model_config import recomputes

LEAST_CONTEXT = 256
USUAL_LOAD = Load(context=2048, requests=8)
_SMALL_CACHES = (0.25, 0.1)
"""GiB for running requests and known prefixes: enough for a few agents with a small model."""
_MOST_TAKEN = 0.5
"""Share of the memory that a faster setting may take."""
_CGROUP_FILES = ("memory.max", "memory/memory.limit_in_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Parts of all processes on this machine, and the load that they are planned for."""

    shape: ModelShape
    load: Load
    parts: tuple[Part, ...]

    def total(self, *, on_gpu: bool = False) -> float:
        """Bytes of main memory, or of GPU memory."""
        return sum(part.size for part in self.parts if part.on_gpu is on_gpu)

    def by_process(self) -> dict[str, float]:
        """Bytes of main memory by process, in the order in which they start."""
        sizes: dict[str, float] = {}
        for part in self.parts:
            if not part.on_gpu:
                sizes[part.process] = sizes.get(part.process, 0.0) + part.size
        return sizes

    def fits(self, memory: float | None, gpu: float | None) -> bool:
        """Whether it fits into this many bytes; None: not checked."""
        return (memory is None or self.total() <= memory) and (
            gpu is None or self.total(on_gpu=True) <= gpu
        )


def plan_of(
    config: RunConfig, shape: ModelShape, held: HeldDtype, load: Load, *, servers: bool = False
) -> MemoryPlan:
    """What the processes of `config` take on this machine. `held`: the dtype of frozen weights.

    A server that the run did not start takes its memory elsewhere or, with `servers`, on the GPU.
    Raises ConfigError for a further teacher whose configuration does not state its sizes.
    """
    limits = [
        one.embedded.context_length
        for _, _, one in _engines(config)
        if one.url is None and one.embedded is not None and one.embedded.context_length is not None
    ]
    load = replace(load, context=min(load.context, shape.context_length, *limits))
    parts: list[Part] = []
    for name, uses, engine in _engines(config):
        if engine.url is None and engine.embedded is not None:
            parts += engine_parts(name, uses, shape, engine.embedded, load)
        elif servers:
            parts += server_parts(shape, uses, load)
    for name, group in config.teachers.items():
        teacher, other = f"teacher {name}", shape_of(group.embedded.model)
        parts += engine_parts(teacher, teacher, other, group.embedded, load) * group.replicas
    parts += trainer_parts(shape, config.trainer, held, load)
    endpoint = ENDPOINT * config.proxy.workers
    others = (("endpoint", endpoint), ("judge", JUDGE), ("command", COMMAND))
    parts += [Part(process=name, what="program", size=float(size)) for name, size in others]
    return MemoryPlan(shape=shape, load=load, parts=tuple(parts))


def _engines(config: RunConfig) -> list[tuple[str, str, EngineConfig]]:
    if config.frozen.shared or config.is_one_server:
        return [("engine", "policy, judge and teacher", config.policy)]
    return [
        ("policy engine", "the policy", config.policy),
        ("frozen engine", "judge and teacher", config.frozen),
    ]


def remedies(
    config: RunConfig,
    shape: ModelShape,
    held: HeldDtype,
    load: Load,
    *,
    memory: float | None,
    gpu: float | None,
) -> list[str]:
    """What to set so that it fits, each change on top of those before; empty if nothing helps."""
    said: dict[str, str] = {}
    for kind, words, smaller, shorter in _smaller(config, load):
        said[kind] = words
        plan = plan_of(smaller, shape, held, shorter, servers=gpu is not None)
        if plan.fits(memory, gpu):
            return list(said.values())
    return []


def faster(
    config: RunConfig, shape: ModelShape, held: HeldDtype, load: Load, memory: float | None
) -> str | None:
    """What would train faster on a CPU and leaves half of the memory free; None: nothing would."""
    trainer = config.trainer
    if (
        memory is None
        or trainer.device != "cpu"
        or trainer.memory_gb is not None
        or trainer.gradient_checkpointing is not None
        or not recomputes(trainer, shape.width)
    ):
        return None
    changed = trainer.model_copy(update={"gradient_checkpointing": False})
    plan = plan_of(config.model_copy(update={"trainer": changed}), shape, held, load)
    if plan.total() > _MOST_TAKEN * memory:
        return None
    return (
        "trainer.gradient_checkpointing=false makes a training step 1.4 to 2 times as fast "
        f"(docs/models.md), with {gibibytes(plan.total())}"
    )


def _smaller(config: RunConfig, load: Load) -> Iterator[tuple[str, str, RunConfig, Load]]:
    """Smaller and smaller settings: what changes, in words, and the result."""
    if config.trainer.lora is None:
        adapters = config.trainer.model_copy(update={"lora": LoraConfig(rank=8, alpha=16)})
        config = config.model_copy(update={"trainer": adapters})
        yield "lora", "adapters instead of all weights (trainer.lora.rank=8)", config, load
    if not config.frozen.shared and config.frozen.url is None and config.policy.url is None:
        shared = config.frozen.model_copy(update={"shared": True})
        config = config.model_copy(update={"frozen": shared})
        words = "one engine for policy, judge and teacher (frozen.shared=true)"
        yield "shared", words, config, load
    rows, prefixes = _SMALL_CACHES
    update = {"kv_cache_gib": rows, "prefix_cache_gib": prefixes}
    for role in ("policy", "frozen"):
        engine: EngineConfig = getattr(config, role)
        if engine.url is None and engine.embedded is not None:
            embedded = engine.embedded.model_copy(update=update)
            changed = engine.model_copy(update={"embedded": embedded})
            config = config.model_copy(update={role: changed})
    words = (
        f"smaller caches (policy.embedded.kv_cache_gib={rows:g}, "
        f"policy.embedded.prefix_cache_gib={prefixes:g})"
    )
    yield "caches", words, config, load
    context = load.context
    while context >= 2 * LEAST_CONTEXT:
        context //= 2
        trainer = config.trainer.model_copy(
            update={"micro_batch_tokens": min(config.trainer.micro_batch_tokens, context)}
        )
        config = config.model_copy(update={"trainer": trainer})
        words = (
            f"texts of at most {context:,} tokens (policy.embedded.context_length={context}, "
            f"trainer.micro_batch_tokens={context})"
        )
        yield "context", words, config, replace(load, context=context)


def memory_of_machine() -> float | None:
    """Bytes that this process and its children may use: the machine's, or a container's limit;
    None if the system does not tell.
    """
    try:
        found = re.search(r"^MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    sizes = [1024.0 * int(found[1])] if found else []
    for name in _CGROUP_FILES:
        file = Path("/sys/fs/cgroup", name)
        if file.is_file() and (text := file.read_text().strip()).isdigit():
            sizes.append(float(text))
    return min(sizes, default=None)


def gibibytes(size: float) -> str:
    """`1.4 GiB`, or `34 MiB` below a tenth of a GiB."""
    return f"{size / GIB:.1f} GiB" if size >= 0.095 * GIB else f"{size / MIB:.0f} MiB"
