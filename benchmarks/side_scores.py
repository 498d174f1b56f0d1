"""The cost of letting an engine score side samples, compared with a teacher in the trainer.

    python -m benchmarks.side_scores [--model FOLDER] [--turns 12] [--prompt 300] [--response 100]

Turns of random tokens, with m random tokens next to each token of a response. The engine runs in a
process of its own, started like by `serve`, and scores one turn after another. All ways alternate;
medians of seconds per turn, and the largest difference between both teachers' scores.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.embedded_process import embedded_engine
from records.types import Ids, Logprobs
from rollout_bridge.engine.client import EngineClient
from trainer.batch.collate import score_responses
from trainer.config import TrainerConfig
from trainer.model.policy import Policy

SIZES = (4, 16, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Prompt [P], response [R], and the tokens next to it [R, m]."""

    prompt: Ids
    response: Ids
    tokens: Ids


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="examples/tool_lab/model")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--prompt", type=int, default=300, help="tokens of each prompt")
    parser.add_argument("--response", type=int, default=100, help="tokens of each response")
    parser.add_argument("--rounds", type=int, default=3)
    asyncio.run(_compare(parser.parse_args()))


async def _compare(given: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    teacher = Policy.load(
        given.model,
        device="cpu",
        dtype="float32",
        chunk_tokens=TrainerConfig().logprob_chunk_tokens,
    ).freeze()
    print("| m | teacher in the trainer | engine, sampled tokens alone | engine | differ by |")
    print("|---|---|---|---|---|")
    with embedded_engine(given.model, "--threads", "1") as url:
        async with EngineClient(url, vocab_size=teacher.vocab_size) as engine:
            for size in SIZES:
                print(await _row(given, teacher, engine, size), flush=True)


async def _row(given: argparse.Namespace, teacher: Policy, engine: EngineClient, size: int) -> str:
    seconds: list[list[float]] = [[], [], []]
    apart = 0.0
    for number in range(given.rounds):
        turns = _turns(given, teacher.vocab_size, size, seed=1000 * size + number)
        found: list[list[Logprobs]] = []
        for column, way in enumerate((_here(teacher), _plain(engine), _there(engine))):
            begun = time.perf_counter()
            found.append([await way(turn) for turn in turns])
            seconds[column].append((time.perf_counter() - begun) / len(turns))
        pairs = zip(found[0], found[2], strict=True)
        apart = max(apart, *(float(np.abs(one - other).max()) for one, other in pairs))
    own, plain, asked = (statistics.median(one) for one in seconds)
    times = f"{own:.3f} s | {plain:.3f} s | {asked:.3f} s, {asked / own:.1f} x"
    return f"| {size} | {times} | {apart:.1e} |"


def _turns(given: argparse.Namespace, vocab_size: int, size: int, seed: int) -> list[Turn]:
    generator = np.random.default_rng(seed)

    def ids(*shape: int) -> Ids:
        return generator.integers(3, vocab_size, size=shape).astype(np.int32)

    return [
        Turn(
            prompt=ids(given.prompt), response=ids(given.response), tokens=ids(given.response, size)
        )
        for _ in range(given.turns)
    ]


def _here(teacher: Policy) -> Callable[[Turn], Awaitable[Logprobs]]:
    async def score(turn: Turn) -> Logprobs:
        [scores] = score_responses(
            teacher,
            [turn.prompt],
            [turn.response],
            max_tokens=8192,
            device="cpu",
            support_ids=[torch.from_numpy(turn.tokens).long()],
        )
        assert scores.support is not None
        return scores.support.numpy()

    return score


def _plain(engine: EngineClient) -> Callable[[Turn], Awaitable[Logprobs]]:
    async def score(turn: Turn) -> Logprobs:
        return await engine.score(np.concatenate([turn.prompt, turn.response]), len(turn.prompt))

    return score


def _there(engine: EngineClient) -> Callable[[Turn], Awaitable[Logprobs]]:
    async def score(turn: Turn) -> Logprobs:
        ids = np.concatenate([turn.prompt, turn.response])
        return await engine.score_tokens(ids, len(turn.prompt), turn.tokens)

    return score


if __name__ == "__main__":
    main()
