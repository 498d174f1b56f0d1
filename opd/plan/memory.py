"""Peak memory of each process of a run, in bytes. Pure functions of sizes and settings.

A process holds weights, some values for each token of the texts that it works on, and what one pass
computes. Programs and libraries are constants, measured on Linux with Python 3.11.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from opd.plan.shape import ModelShape
from rollout_bridge.embedded.config import EmbeddedEngineConfig
from trainer.config import HeldDtype, TrainerConfig
from trainer.model.model_config import recomputes

GIB = 2**30
MIB = 2**20
_TORCH = 340 * MIB
"""Python with torch, transformers and peft."""
_CUDA = 1.2 * GIB
"""Memory that CUDA, its libraries and its allocator occupy on a GPU."""
_SERVER = 2.5 * GIB
ENDPOINT, JUDGE, COMMAND = 120 * MIB, 140 * MIB, 400 * MIB
_SCORED_LOGITS = 2**25
"""Most logits of a pass of the embedded engine while scoring."""
_TILE = 1024 * 8192
"""Logits in a tile; the trainer holds a few such tiles at once."""
_FLOAT, _HALF = 4, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The load of a run: tokens of a text, and requests answered at the same time."""

    context: int
    requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Memory of one process for one purpose, in bytes."""

    process: str
    what: str
    size: float
    on_gpu: bool = False
    is_needed: bool = False
    """Weights that no setting removes: without them the process cannot run."""


def engine_parts(
    name: str, uses: str, shape: ModelShape, config: EmbeddedEngineConfig, load: Load
) -> list[Part]:
    """Parts of an embedded engine that serves `uses`."""
    on_gpu = config.device.startswith("cuda")
    itemsize = _engine_itemsize(config)
    token = shape.cache_bytes(itemsize)
    rows_gib, prefix_gib = config.cache_gib(on_gpu=on_gpu)
    rows = min(load.requests, config.max_batch) * load.context * token
    if rows_gib is not None:
        rows = min(rows, max(rows_gib * GIB, load.context * token))
    prefix = load.requests * load.context * token if prefix_gib is None else prefix_gib * GIB
    at_once = min(config.max_prefill_tokens, max(load.context, 1024))
    kept = at_once * shape.layer_values() * itemsize
    logits = 2 * min(_SCORED_LOGITS, at_once * shape.vocab_size) * _FLOAT
    weights = shape.num_parameters * itemsize
    dtype = "bfloat16" if itemsize == _HALF else "float32"
    return [
        Part(process=name, what="program", size=_TORCH),
        *([Part(process=name, what="CUDA", size=_CUDA, on_gpu=True)] if on_gpu else []),
        Part(
            process=name,
            what=f"weights for {uses} ({dtype})",
            size=weights,
            on_gpu=on_gpu,
            is_needed=True,
        ),
        Part(
            process=name,
            what=f"{load.requests} requests of {load.context:,} tokens",
            size=rows,
            on_gpu=on_gpu,
        ),
        Part(process=name, what="known prefixes", size=prefix, on_gpu=on_gpu),
        Part(process=name, what="a pass", size=kept + logits, on_gpu=on_gpu),
    ]


def server_parts(shape: ModelShape, uses: str, load: Load) -> list[Part]:
    """The least that an external server takes on the same GPU (SGLang, in bfloat16); with more, it
    keeps more requests and prefixes.
    """
    token = shape.cache_bytes(_HALF)
    sizes = {
        "CUDA and its graphs": _SERVER,
        f"weights for {uses} (bfloat16)": float(shape.num_parameters * _HALF),
        f"{load.requests} requests of {load.context:,} tokens": float(
            load.requests * load.context * token
        ),
    }
    return [
        Part(process="server", what=what, size=size, on_gpu=True) for what, size in sizes.items()
    ]


def trainer_parts(
    shape: ModelShape, config: TrainerConfig, held: HeldDtype, load: Load
) -> list[Part]:
    """Parts of the trainer; `held` is the dtype of frozen weights."""
    on_gpu = config.device.startswith("cuda")
    frozen = shape.num_parameters * (_HALF if held == "bfloat16" else _FLOAT)
    needs_start = config.needs_start or config.teacher.kind in ("frozen", "trust_region")
    if config.lora is None:
        trained = shape.num_parameters
        kinds = "float32, with gradients and AdamW's two moments"
        weights = [
            Part(
                process="trainer",
                what=f"weights ({kinds})",
                size=16.0 * trained,
                is_needed=True,
            )
        ]
        if needs_start:
            what = f"the start, frozen ({held})"
            weights.append(Part(process="trainer", what=what, size=float(frozen)))
    else:
        trained = shape.adapter_parameters(config.lora.rank)
        weights = [
            Part(process="trainer", what=f"base, frozen ({held})", size=float(frozen)),
            Part(
                process="trainer",
                what=f"adapters of rank {config.lora.rank}, their gradients and AdamW's moments",
                size=16.0 * trained,
            ),
        ]
    program = Part(process="trainer", what="program", size=_TORCH)
    cuda = [Part(process="trainer", what="CUDA", size=_CUDA)] if on_gpu else []
    size, what = _pass(shape, config, load), f"a pass on {_pass_tokens(config, load):,} tokens"
    left = math.inf
    if config.memory_gb is not None:
        left = max(1e9 * config.memory_gb - sum(one.size for one in (program, *weights)), 0.0)
    if left < size:
        size, what = left, "passes, made to fit into trainer.memory_gb"
    a_pass = Part(process="trainer", what=what, size=size)
    return [program, *(replace(part, on_gpu=on_gpu) for part in (*cuda, *weights, a_pass))]


def _pass_tokens(config: TrainerConfig, load: Load) -> int:
    return max(config.micro_batch_tokens, load.context)


def _pass(shape: ModelShape, config: TrainerConfig, load: Load) -> float:
    """Memory of a forward and a backward pass: the input of every layer, or all that every layer
    computes; the layer that is recomputed; one matrix in float32; tiles of logits.
    """
    tokens = _pass_tokens(config, load)
    layer = tokens * shape.layer_values() * _FLOAT
    layers = shape.num_layers * tokens * shape.width * _FLOAT
    if not recomputes(config, shape.width):
        layers = shape.num_layers * layer
    matrix = max(shape.width * shape.inner, 8192 * shape.width) * _FLOAT
    tiles = 3 * min(_TILE, tokens * shape.vocab_size) * _FLOAT
    return layers + layer + matrix + tiles


def _engine_itemsize(config: EmbeddedEngineConfig) -> int:
    if config.dtype == "auto":
        return _FLOAT if config.device == "cpu" else _HALF
    return _FLOAT if config.dtype == "float32" else _HALF
