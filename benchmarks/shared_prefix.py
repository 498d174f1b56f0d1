"""How much faster log-probs and gradients are if rows begin alike: an agent's system prompt and
tools go through the model once.

    python -m benchmarks.shared_prefix [--model FOLDER] [--prefix 240] [--tail 40] [--rows 24]

Rows of random tokens: `prefix` tokens that all rows share, and `tail` own tokens, half of which
train. Both ways alternate, on one thread, with adapters, in the trainer's micro-batches; medians.
Exits with 1 if a gradient differs by more than 1e-4 of the largest.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rollout_bridge.merging import PackedSequence, TurnSpan
from trainer.batch.collate import build_micro_batch, plan_micro_batches
from trainer.config import LoraConfig, TrainerConfig
from trainer.model.model_config import config_value, recomputes
from trainer.model.policy import Policy

MOST = 1e-4


def main() -> None:
    """Print one line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("examples/tool_lab/model"))
    parser.add_argument("--prefix", type=int, default=240, help="tokens with which all rows begin")
    parser.add_argument("--tail", type=int, default=40, help="further tokens of each row")
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    config = TrainerConfig()
    policy = Policy.load(
        str(given.model),
        device="cpu",
        dtype="float32",
        chunk_tokens=config.logprob_chunk_tokens,
        lora=LoraConfig(),
        recompute=recomputes(config, config_value(str(given.model), "hidden_size")),
    )
    torch.manual_seed(0)
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    rows = _rows(given, policy.vocab_size)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    gradients: dict[bool, Tensor] = {}
    for number in range(given.rounds + 1):
        for shares in (True, False):
            taken_s, gradients[shares] = _pass(policy, rows, config.micro_batch_tokens, shares)
            if number:  # the first one warms up
                seconds[shares].append(taken_s)
    shared, whole = (statistics.median(seconds[shares]) for shares in (True, False))
    largest = float(gradients[False].abs().max())
    difference = float((gradients[True] - gradients[False]).abs().max()) / largest
    print(
        f"{given.rows} rows of {given.prefix} + {given.tail} tokens: {shared:.2f} s with the "
        f"prefix shared, {whole:.2f} s without: {whole / shared:.1f} x; "
        f"gradients differ by {difference:.1e}"
    )
    raise SystemExit(0 if difference <= MOST else 1)


def _rows(given: argparse.Namespace, vocab_size: int) -> list[PackedSequence]:
    draw = np.random.default_rng(0)
    prefix = draw.integers(1, vocab_size, given.prefix)
    length, start = given.prefix + given.tail, given.prefix + given.tail // 2
    return [
        PackedSequence(
            ids=np.concatenate([prefix, draw.integers(1, vocab_size, given.tail)]).astype(np.int32),
            spans=(TurnSpan(turn=row, start=start, end=length),),
        )
        for row in range(given.rows)
    ]


def _pass(
    policy: Policy, rows: list[PackedSequence], max_tokens: int, shares: bool
) -> tuple[float, Tensor]:
    """Seconds for all log-probs and gradients, and the gradients in one row."""
    policy.shares_prefixes = shares
    parameters = policy.trainable_parameters()
    begun = time.perf_counter()
    groups = plan_micro_batches(rows, max_tokens, shares=shares and not policy.recomputes)
    for group in groups:
        batch = build_micro_batch(group)
        policy.token_logprobs(batch.ids_BT, batch.mask_BT).logprobs_BT.sum().backward()
    taken_s = time.perf_counter() - begun
    found = torch.cat([one.grad.flatten() for one in parameters if one.grad is not None])
    for one in parameters:
        one.grad = None
    return taken_s, found


if __name__ == "__main__":
    main()
