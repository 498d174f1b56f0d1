"""The cost of drawing side samples with the policy's engine, as a run on slime does.

    python -m benchmarks.side_draws [--model FOLDER] [--turns 4] [--response 300]

The engine answers a few questions at temperature 1, and then draws m side samples at each token of
its answers. Per turn: requests to the engine, in all and for each token of the response, seconds,
and those of one scoring of the same response. The engine runs in a process of its own, started like
by `serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

import numpy as np
import torch
from transformers import AutoTokenizer

from benchmarks.embedded_process import embedded_engine
from records.names import SideSource
from records.types import Ids
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.types import SamplingParams
from rollout_bridge.scoring.side_samples import SideSampler
from trainer.model.model_config import model_vocab_size

SIZES = (1, 16, 64)
QUESTIONS = (
    "How does a compiler turn a program into machine code?",
    "Tell a story about a lighthouse and two brothers.",
    "Write a Python function that merges two sorted lists, and explain it.",
    "What should I see in Oslo in winter?",
)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="examples/tool_lab/model")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--response", type=int, default=300, help="tokens of each response")
    asyncio.run(_measure(parser.parse_args()))


async def _measure(given: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    vocab_size = model_vocab_size(given.model)
    with embedded_engine(given.model, "--threads", "1") as url:
        async with EngineClient(url, vocab_size=vocab_size) as engine:
            turns = [
                await _turn(engine, prompt, given.response)
                for prompt in _prompts(given.model, given.turns)
            ]
            print("| m | requests per turn | for each token | s per turn | one scoring, s |")
            print("|---|---|---|---|---|")
            for size in SIZES:
                sampler = SideSampler(engine, SideSource.POLICY, size, vocab_size=vocab_size)
                print(await _row(engine, sampler, size, turns), flush=True)


def _prompts(model: str, number: int) -> list[Ids]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    return [
        np.array(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": QUESTIONS[place % len(QUESTIONS)]}],
                add_generation_prompt=True,
                return_dict=False,
            ),
            dtype=np.int32,
        )
        for place in range(number)
    ]


async def _turn(engine: EngineClient, prompt: Ids, length: int) -> tuple[Ids, Ids]:
    params = SamplingParams(max_new_tokens=length, ignore_eos=True)
    return prompt, (await engine.generate(prompt, params)).output_ids


async def _row(
    engine: EngineClient, sampler: SideSampler, size: int, turns: list[tuple[Ids, Ids]]
) -> str:
    requests, seconds, scoring = [], [], []
    for prompt, response in turns:
        begun = time.perf_counter()
        await engine.score(np.concatenate([prompt, response]), len(prompt))
        scored = time.perf_counter()
        drawn = await sampler.draw(prompt, response, "turn")
        requests.append(drawn.num_requests)
        seconds.append(time.perf_counter() - scored)
        scoring.append(scored - begun)
    mean, length = statistics.mean(requests), statistics.mean(len(one) for _, one in turns)
    times = f"{statistics.median(seconds):.2f} | {statistics.median(scoring):.2f}"
    return f"| {size} | {mean:.0f} | {mean / length:.2f} | {times} |"


if __name__ == "__main__":
    main()
