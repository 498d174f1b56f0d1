"""How fast the embedded engine is compared with transformers' own batched generation, and how soon
a request that arrives late gets its first token.

    python -m benchmarks.engine_throughput --model examples/tool_lab/model

Both measurements alternate with their reference, with new prompts each time (nothing is in the
prefix cache), and report medians. The engine runs in its own process and is used over HTTP,
streaming, with log-probabilities.

1. Tokens per second of N concurrent requests, divided by those of one batched `generate` call of
   the same prompts, lengths and temperature (which returns no log-probabilities).
2. Time to the first token of a request that arrives while N - 1 others decode, divided by its own
   prefill plus two decode steps. Prefill alone = first token on the idle engine minus one step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from benchmarks.embedded_process import embedded_engine
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.types import SamplingParams


def main() -> None:
    """Run both measurements and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_KeepLines)
    parser.add_argument("--model", default="examples/tool_lab/model")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=300)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of the engine and of the reference")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    arguments = parser.parse_args()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(arguments.threads)
    reference = Reference(arguments)
    options = ("--device", arguments.device, "--dtype", arguments.dtype)
    options += ("--threads", str(arguments.threads))
    with embedded_engine(arguments.model, *options) as url:
        result = asyncio.run(measure(arguments, reference, url))
    print(json.dumps(result))


class Reference:
    """transformers' batched generation of whole batches."""

    def __init__(self, arguments: argparse.Namespace):
        on_cpu = arguments.device == "cpu"
        automatic = "float32" if on_cpu else "bfloat16"
        dtype = getattr(torch, automatic if arguments.dtype == "auto" else arguments.dtype)
        self._model: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype)
        self._model.to(arguments.device).eval()
        self._device = arguments.device
        self.vocab_size = int(self._model.get_input_embeddings().weight.shape[0])
        eos = self._model.generation_config.eos_token_id
        self.end_ids = {eos} if isinstance(eos, int) else set(eos or ())

    def tokens_per_second(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Sampled tokens per second of one call, prefill included."""
        ids_BT = torch.tensor(prompts, device=self._device)
        begin = time.perf_counter()
        with torch.inference_mode():
            output_BT = self._model.generate(
                ids_BT,
                attention_mask=torch.ones_like(ids_BT),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                pad_token_id=0,
            )
        sampled = output_BT.shape[0] * (output_BT.shape[1] - ids_BT.shape[1])
        return sampled / (time.perf_counter() - begin)


async def measure(arguments: argparse.Namespace, reference: Reference, url: str) -> dict:
    """Both measurements as numbers; the ratios should be >= 0.6 and <= 1."""
    draw = random.Random(0)
    ordinary = [i for i in range(reference.vocab_size) if i not in reference.end_ids]

    def prompts(count: int) -> list[list[int]]:
        return [draw.choices(ordinary, k=arguments.prompt_tokens) for _ in range(count)]

    # Every row is decoded to the end in both: end tokens are biased away by the reference, and
    # the engine is asked to ignore them.
    count, new_tokens = arguments.requests, arguments.new_tokens
    async with EngineClient(url, vocab_size=reference.vocab_size) as client:
        engine_rates, reference_rates, pairs = [], [], []
        for number in range(arguments.rounds + 1):
            batch = prompts(count)
            rate = reference.tokens_per_second(batch, new_tokens)
            engine_rate = await engine_tokens_per_second(client, batch, new_tokens)
            if number:  # The first round warms up.
                reference_rates.append(rate)
                engine_rates.append(engine_rate)
                pairs.append(engine_rate / rate)
        late = [await first_token(client, prompts, count) for _ in range(4 * arguments.rounds)]
    return {
        "requests": count,
        "prompt_tokens": arguments.prompt_tokens,
        "new_tokens": new_tokens,
        "threads": arguments.threads,
        "generate_tokens_per_s": round(statistics.median(reference_rates)),
        "engine_tokens_per_s": round(statistics.median(engine_rates)),
        "throughput_ratio": round(statistics.median(pairs), 3),
        "first_token_ms": round(1e3 * statistics.median(item[0] for item in late), 2),
        "prefill_ms": round(1e3 * statistics.median(item[1] for item in late), 2),
        "decode_step_ms": round(1e3 * statistics.median(item[2] for item in late), 2),
        "first_token_ratio": round(
            statistics.median(item[0] for item in late)
            / statistics.median(item[1] + 2 * item[2] for item in late),
            3,
        ),
    }


async def engine_tokens_per_second(
    client: EngineClient, prompts: list[list[int]], new_tokens: int
) -> float:
    """Sampled tokens per second of concurrent streamed requests, prefill included."""
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)

    async def one(prompt: list[int]) -> int:
        tokens = 0
        async for chunk in client.stream(prompt, params):
            tokens += len(chunk.new_ids)
        return tokens

    begin = time.perf_counter()
    sampled = sum(await asyncio.gather(*map(one, prompts)))
    return sampled / (time.perf_counter() - begin)


async def first_token(client: EngineClient, prompts, count: int) -> tuple[float, float, float]:
    """Seconds: first token of a late request, its prefill alone, one decode step of the others."""
    idle_first, idle_step = await _timed_start(client, prompts(1)[0])
    params = SamplingParams(max_new_tokens=2000, ignore_eos=True)
    clock = _TokenClock()

    async def background(prompt: list[int], watched: bool) -> None:
        async for chunk in client.stream(prompt, params):
            if watched:
                clock.add(len(chunk.new_ids))

    others = [
        asyncio.create_task(background(prompt, number == 0))
        for number, prompt in enumerate(prompts(count - 1))
    ]
    try:
        # Once the first one decodes, all do: their prompts went in together.
        while clock.total < 40:
            await asyncio.sleep(0.005)
        step = clock.step
        late_first, _ = await _timed_start(client, prompts(1)[0])
    finally:
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    return late_first, idle_first - idle_step, step


async def _timed_start(client: EngineClient, prompt: list[int]) -> tuple[float, float]:
    """Seconds to the first token, and of a step after it."""
    clock = _TokenClock()
    async for chunk in client.stream(prompt, SamplingParams(max_new_tokens=16, ignore_eos=True)):
        clock.add(len(chunk.new_ids))
    return clock.first, clock.step


class _TokenClock:
    """When tokens of one stream arrived; several may arrive together."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._arrivals: list[tuple[float, int]] = []

    def add(self, tokens: int) -> None:
        self._arrivals.append((time.perf_counter(), tokens))

    @property
    def total(self) -> int:
        return sum(tokens for _, tokens in self._arrivals)

    @property
    def first(self) -> float:
        return self._arrivals[0][0] - self._begin

    @property
    def step(self) -> float:
        """Mean seconds per token, from the first to the last arrival."""
        elapsed = self._arrivals[-1][0] - self._arrivals[0][0]
        return elapsed / sum(tokens for _, tokens in self._arrivals[1:])


class _KeepLines(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


if __name__ == "__main__":
    main()
