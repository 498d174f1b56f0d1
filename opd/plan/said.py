"""A plan in words: the table of `opd plan`, and the line of `opd serve`."""

from __future__ import annotations

from collections.abc import Iterator

from opd.plan.memory import Load, Part
from opd.plan.run_plan import (
    USUAL_LOAD,
    MemoryPlan,
    faster,
    gibibytes,
    memory_of_machine,
    plan_of,
    remedies,
)
from opd.plan.shape import ModelShape, shape_of
from opd.run.config import RunConfig
from trainer.errors import ConfigError, StartupError
from trainer.model.model_config import held_dtype


def planned_lines(
    config: RunConfig, load: Load, *, memory: float | None, gpu: float | None
) -> list[str]:
    """The plan of a run as lines: every part, sums, whether it fits, and what to change if not."""
    shape = shape_of(config.model)
    held = held_dtype(config.model, config.trainer.base_dtype)
    plan = plan_of(config, shape, held, load, servers=gpu is not None)
    lines = [_model_line(config, shape), ""]
    lines += _table([part for part in plan.parts if not part.on_gpu], "main memory")
    on_gpu = [part for part in plan.parts if part.on_gpu]
    if on_gpu:
        lines += ["", *_table(on_gpu, "GPU")]
    has_servers = config.policy.url is not None or config.frozen.url is not None
    if has_servers and gpu is None:
        lines += ["", "engines at their own address (url) are not counted"]
    lines += ["", *_verdict(plan, memory, gpu)]
    if not plan.fits(memory, gpu):
        found = remedies(config, shape, held, load, memory=memory, gpu=gpu)
        lines += [f"  - {one}" for one in found] or [
            "  no setting makes it fit: use a smaller model, or serve it from SGLang on another "
            "machine (docs/sglang.md)"
        ]
    elif quicker := faster(config, shape, held, load, memory):
        lines.append(quicker)
    return lines


def serve_line(config: RunConfig) -> str:
    """What `opd serve` prints at its start, also if the model's configuration does not state its
    sizes. Raises StartupError if the weights are larger than this machine's memory.
    """
    memory = memory_of_machine()
    held = held_dtype(config.model, config.trainer.base_dtype)
    here = "" if memory is None else f" of {gibibytes(memory)}"
    try:
        shape = shape_of(config.model)
        plan = plan_of(config, shape, held, USUAL_LOAD)
    except ConfigError as error:
        return f"memory: not estimated ({error})"
    weights = sum(part.size for part in plan.parts if part.is_needed and not part.on_gpu)
    if memory is not None and weights > memory:
        raise StartupError(
            f"model: the weights of '{config.model}' alone take {gibibytes(weights)}{here}: use a "
            "smaller model, or serve it from SGLang on another machine (docs/sglang.md); opd plan "
            "shows what takes how much"
        )
    sizes = ", ".join(f"{name} {gibibytes(size)}" for name, size in plan.by_process().items())
    line = f"memory: about {gibibytes(plan.total())}{here} ({sizes})"
    if plan.total(on_gpu=True):
        line += f", and {gibibytes(plan.total(on_gpu=True))} on the GPU"
    line += f" with {plan.load.requests} requests of {plan.load.context:,} tokens at a time"
    if memory is not None and plan.total() > memory:
        return f"{line}; that may be too much: opd plan shows what to change"
    quicker = faster(config, shape, held, USUAL_LOAD, memory)
    return line if quicker is None else f"{line}; {quicker}"


def _model_line(config: RunConfig, shape: ModelShape) -> str:
    lora = config.trainer.lora
    weights = "full weights" if lora is None else f"LoRA of rank {lora.rank}"
    return (
        f"{config.model}: {shape.num_parameters / 1e6:,.0f} million parameters, "
        f"{shape.num_layers} layers, {shape.context_length:,} tokens at most; trains {weights}"
    )


def _table(parts: list[Part], where: str) -> Iterator[str]:
    width = max(len(part.process) for part in parts)
    yield f"{where}, at the largest"
    for part in parts:
        yield f"  {part.process:<{width}}  {gibibytes(part.size):>9}  {part.what}"
    total = sum(part.size for part in parts)
    yield f"  {'all':<{width}}  {gibibytes(total):>9}"


def _verdict(plan: MemoryPlan, memory: float | None, gpu: float | None) -> Iterator[str]:
    for size, on_gpu, name in ((memory, False, "main memory"), (gpu, True, "GPU")):
        if size is None:
            continue
        total = plan.total(on_gpu=on_gpu)
        says = "fits" if total <= size else "does not fit; what would:"
        yield f"{name}: {gibibytes(total)} of {gibibytes(size)}: {says}"
