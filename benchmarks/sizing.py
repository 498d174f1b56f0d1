"""The table of docs/sizing.md: memory of models with 0.1 to 8 billion parameters, by `opd plan`.

    python -m benchmarks.sizing

Nothing is loaded: the sizes are those in the models' own config.json. A test checks that the page
agrees with this output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from opd.plan.memory import GIB, Load
from opd.plan.run_plan import USUAL_LOAD, MemoryPlan, plan_of
from opd.plan.shape import ModelShape
from opd.run import recipe
from opd.run.config import RunConfig, build, merge
from opd.run.defaults import single_machine

SIZES = (8, 16, 24, 80)
"""GiB of a machine or a GPU."""
CONTEXTS = (2048, 8192)
_QWEN = {"num_heads": 16, "num_kv_heads": 8, "head_size": 128, "vocab_size": 151_936}
_COMMON = {"num_matrices": 3, "num_experts": 1, "context_length": 8192}
MODELS = {
    "SmolLM2 135M": ModelShape(
        **_COMMON,
        num_layers=30,
        width=576,
        inner=1536,
        num_heads=9,
        num_kv_heads=3,
        head_size=64,
        vocab_size=49_152,
        is_tied=True,
    ),
    "Gemma 3 270M": ModelShape(
        **_COMMON,
        num_layers=18,
        width=640,
        inner=2048,
        num_heads=4,
        num_kv_heads=1,
        head_size=256,
        vocab_size=262_144,
        is_tied=True,
    ),
    "Qwen3 0.6B": ModelShape(
        **_COMMON, **_QWEN, num_layers=28, width=1024, inner=3072, is_tied=True
    ),
    "Qwen3 1.7B": ModelShape(
        **_COMMON, **_QWEN, num_layers=28, width=2048, inner=6144, is_tied=True
    ),
    "Qwen3 4B": ModelShape(
        **_COMMON,
        **{**_QWEN, "num_heads": 32},
        num_layers=36,
        width=2560,
        inner=9728,
        is_tied=True,
    ),
    "Qwen3 8B": ModelShape(
        **_COMMON,
        **{**_QWEN, "num_heads": 32},
        num_layers=36,
        width=4096,
        inner=12_288,
        is_tied=False,
    ),
}


def rows() -> Iterator[str]:
    """The table's lines, in Markdown."""
    yield "| model | trains | context | CPU, GiB | fits into | GPU, GiB | fits into |"
    yield "|---|---|---|---|---|---|---|"
    for name, shape in MODELS.items():
        for full in (False, True):
            for context in CONTEXTS:
                load = replace(USUAL_LOAD, context=context)
                on_cpu = _plan(shape, load, full=full, device="cpu").total()
                on_gpu = _plan(shape, load, full=full, device="cuda").total(on_gpu=True)
                weights = "all weights" if full else "LoRA"
                yield (
                    f"| {name} | {weights} | {context:,} | {on_cpu / GIB:.1f} | {_fits(on_cpu)} "
                    f"| {on_gpu / GIB:.1f} | {_fits(on_gpu)} |"
                )


def _plan(shape: ModelShape, load: Load, *, full: bool, device: str) -> MemoryPlan:
    return plan_of(_config(shape, full=full, device=device), shape, "bfloat16", load)


def _config(shape: ModelShape, *, full: bool, device: str) -> RunConfig:
    with TemporaryDirectory() as folder:
        values = single_machine("model", Path(folder))
    learned = recipe.recipe(shape.width, full_weights=full)
    own = {
        "policy": {"embedded": {"device": device}},
        "frozen": {"embedded": {"device": device}, **({} if full else {"shared": True})},
        "trainer": {"device": device},
        "judge": {"base_url": "http://127.0.0.1:0/v1", "model": "later"},
    }
    return build(merge(merge(learned, values), own))


def _fits(size: float) -> str:
    return next((str(one) for one in SIZES if size <= one * GIB), "none of them")


def main() -> None:
    """Print the table."""
    print("\n".join(rows()))


if __name__ == "__main__":
    main()
