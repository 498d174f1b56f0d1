"""How much memory engine and trainer take at most, compared with what `opd plan` predicts.

    python -m benchmarks.memory_plan --model runs/models/smollm2-135m-instruct [MODEL ...]
        [--context 2048] [--requests 8] [--full]

The engine answers --requests requests of --context tokens at the same time, three times with
different texts, so that the prefix cache fills, and then scores as many. The trainer takes a step
of the recipe on samples of that length. Both are processes of their own. MiB of PSS, sampled.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import threading
import time

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import trainer_memory
from opd.plan.memory import MIB, Load, engine_parts, trainer_parts
from opd.plan.shape import shape_of
from rollout_bridge.embedded.config import EmbeddedEngineConfig
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.types import SamplingParams
from trainer.model.model_config import held_dtype, model_vocab_size

_ROUNDS = 3
_SAMPLE_EVERY_S = 0.25
"""For each sample the kernel walks over the process's pages."""
_RESPONSE = 128
_FEW_SAMPLES = "trainer.rollout_batch_size=3"
"""Few samples are enough: a step's peak is that of one pass."""


def main() -> None:
    """Print a table with a row for each process of each model."""
    options = parse_options()
    load = Load(context=options.context, requests=options.requests)
    console = Console()
    table = Table(title=f"{load.requests} requests of {load.context:,} tokens; MiB")
    for head in ("model", "process", "planned", "measured", "planned / measured"):
        table.add_column(head, justify="left" if head in ("model", "process") else "right")
    for model in options.model:
        for process, planned, measured in (
            ("engine", planned_engine(model, load), measured_engine(model, load)),
            (
                "trainer",
                planned_trainer(model, load, full=options.full),
                measured_trainer(model, load, full=options.full),
            ),
        ):
            row = (f"{planned:,.0f}", f"{measured:,}", f"{planned / measured:.2f}")
            table.add_row(model, process, *row)
            console.print(model, process, *row)
    console.print(table)


def planned_engine(model: str, load: Load) -> float:
    """MiB according to `opd plan`."""
    config = EmbeddedEngineConfig(model=model)
    return sum(one.size for one in engine_parts("engine", "", shape_of(model), config, load)) / MIB


def planned_trainer(model: str, load: Load, *, full: bool) -> float:
    """MiB according to `opd plan`, with the recipe of `serve`."""
    config = trainer_memory.trainer_config(_trainer_options(model, load), _weights(full))
    parts = trainer_parts(shape_of(model), config, held_dtype(model, config.base_dtype), load)
    return sum(one.size for one in parts) / MIB


def measured_engine(model: str, load: Load) -> int:
    """The most MiB, while it samples and scores."""
    command = [sys.executable, "-m", "rollout_bridge.embedded", "--model", model]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline()
            if not address:
                raise SystemExit(f"the engine did not start with {model}")
            shares: list[int] = []
            ended = threading.Event()
            watcher = threading.Thread(target=_watch, args=(process.pid, ended, shares))
            watcher.start()
            url = f"http://127.0.0.1:{json.loads(address)['port']}"
            try:
                asyncio.run(_work(url, model_vocab_size(model), load))
            finally:
                ended.set()
                watcher.join()
        finally:
            process.terminate()
    return max(shares)


def measured_trainer(model: str, load: Load, *, full: bool) -> int:
    """The most MiB, during a step and its checkpoint."""
    found = trainer_memory.measure(_trainer_options(model, load), _weights(full), load.context)
    return max(found.peaks.values())


async def _work(url: str, vocab: int, load: Load) -> None:
    generator = np.random.default_rng(0)
    params = SamplingParams(max_new_tokens=_RESPONSE, ignore_eos=True)
    async with EngineClient(url) as client:
        for _ in range(_ROUNDS):
            prompts = generator.integers(3, vocab, (load.requests, load.context - _RESPONSE))
            await asyncio.gather(*(client.generate(one.tolist(), params) for one in prompts))
        texts = generator.integers(3, vocab, (load.requests, load.context))
        start = load.context - _RESPONSE
        await asyncio.gather(*(client.score_with_topk(one.tolist(), start, 8) for one in texts))


def _watch(pid: int, ended: threading.Event, shares: list[int]) -> None:
    while not ended.is_set():
        if (found := trainer_memory.share(pid)) is not None:
            shares.append(found[0])
        time.sleep(_SAMPLE_EVERY_S)


def _weights(full: bool) -> str:
    return "full" if full else "lora"


def _trainer_options(model: str, load: Load) -> argparse.Namespace:
    return argparse.Namespace(model=model, contexts=[load.context], steps=1, set=[_FEW_SAMPLES])


def parse_options() -> argparse.Namespace:
    """Which models, and under what load."""
    parser = argparse.ArgumentParser(description="memory of a run, compared with the plan")
    parser.add_argument("--model", required=True, nargs="+")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--full", action="store_true", help="train all weights")
    return parser.parse_args()


if __name__ == "__main__":
    main()
