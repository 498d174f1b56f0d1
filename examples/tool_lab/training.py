"""Training of the lab's model from rows: tokens and weights, batches that share their family's
prefix, the optimiser loop.

All rows of a family begin with the same few hundred tokens (system prompt, tools). Their keys and
values are computed once per batch, with gradient, and shared by its rows, which halves the cost of
a step. It does not know what rows mean.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    DynamicCache,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from examples.tool_lab.corpus import Row

CONTEXT_WEIGHT = 0.1
THINK_PREFIX_TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRow:
    """Token ids [T] of a row and the loss weight [T] of each as a target."""

    ids: list[int]
    weights: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyData:
    """A family's rows and the tokens with which all of them begin."""

    prefix: list[int]
    rows: list[EncodedRow]


def token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    """The id of one known token. Raises ValueError for a token outside the vocabulary."""
    vocabulary = tokenizer.get_vocab()
    if token not in vocabulary:
        raise ValueError(f"the tokenizer does not know {token!r}")
    return vocabulary[token]


def model_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    """The lab model's architecture: 0.9M parameters."""
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        eos_token_id=token_id(tokenizer, "<|im_end|>"),
        pad_token_id=token_id(tokenizer, "<|endoftext|>"),
        bos_token_id=None,
    )


def encode_row(renderer: Any, row: Row) -> EncodedRow:
    """The row's render and, for each token, its weight as a target: the message's weight on tokens
    that a policy samples.
    """
    rendered = renderer.render(row.messages, tools=row.tools or None)
    weights = []
    seen: dict[int, int] = {}
    for index, is_sampled in zip(rendered.message_indices, rendered.sampled_mask, strict=True):
        weight = CONTEXT_WEIGHT
        if is_sampled:
            # The empty thinking block is part of the generation prompt; nothing should be learned
            # there.
            seen[index] = seen.get(index, 0) + 1
            weight = row.weights.get(index, 0.0) if seen[index] > THINK_PREFIX_TOKENS else 0.0
        weights.append(weight)
    return EncodedRow(ids=list(rendered.token_ids), weights=weights)


def encode_rows(
    renderer: Any, rows: Iterable[Row], report: Callable[[int], None] | None = None
) -> dict[str, FamilyData]:
    """Rows by family, each family with its common prefix."""
    by_family: dict[str, list[EncodedRow]] = {}
    for number, row in enumerate(rows):
        by_family.setdefault(row.family, []).append(encode_row(renderer, row))
        if report is not None and number % 500 == 0:
            report(number)
    data = {}
    for family, encoded in by_family.items():
        data[family] = FamilyData(prefix=common_prefix([r.ids for r in encoded]), rows=encoded)
    return data


def common_prefix(sequences: Sequence[list[int]]) -> list[int]:
    """The longest list with which all of `sequences` begin."""
    first, last = min(sequences), max(sequences)
    length = 0
    while length < min(len(first), len(last)) and first[length] == last[length]:
        length += 1
    return first[:length]


def batches(
    data: FamilyData, size: int, rng: random.Random, pool_batches: int = 24
) -> Iterator[list[EncodedRow]]:
    """Endless batches of rows of similar length, every row once per pass."""
    while True:
        order = list(range(len(data.rows)))
        rng.shuffle(order)
        pool = size * pool_batches
        for start in range(0, len(order) - size + 1, pool):
            chunk = sorted(order[start : start + pool], key=lambda i: len(data.rows[i].ids))
            groups = [chunk[i : i + size] for i in range(0, len(chunk) - size + 1, size)]
            rng.shuffle(groups)
            for group in groups:
                yield [data.rows[i] for i in group]


def batch_loss(
    model: Qwen3ForCausalLM, prefix: Sequence[int], rows: Sequence[EncodedRow]
) -> tuple[torch.Tensor, float]:
    """Weighted sum of the negative log-likelihoods of the rows' tokens after the prefix, and the
    sum of weights.
    """
    start = len(prefix) - 1
    longest = max(len(row.ids) for row in rows) - start
    ids_BT = torch.zeros((len(rows), longest), dtype=torch.long)
    weights_BT = torch.zeros((len(rows), longest))
    for number, row in enumerate(rows):
        length = len(row.ids) - start
        ids_BT[number, :length] = torch.tensor(row.ids[start:])
        weights_BT[number, :length] = torch.tensor(row.weights[start:])
    cache = shared_prefix_cache(model, prefix[:-1], len(rows))
    # No padding mask: rows are padded on the right, and attention is causal.
    logits_BTV = model(input_ids=ids_BT, past_key_values=cache, use_cache=cache is not None).logits
    nll_BT = torch.nn.functional.cross_entropy(
        logits_BTV[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten(), reduction="none"
    ).view(len(rows), -1)
    targets_BT = weights_BT[:, 1:]
    return (nll_BT * targets_BT).sum(), float(targets_BT.sum())


def shared_prefix_cache(
    model: Qwen3ForCausalLM, prefix: Sequence[int], batch_size: int
) -> DynamicCache | None:
    """Keys and values of `prefix`, computed once and expanded to the batch; None for an empty
    prefix.
    """
    if not prefix:
        return None
    single = DynamicCache(config=model.config)
    model.model(input_ids=torch.tensor([list(prefix)]), past_key_values=single, use_cache=True)
    shared = DynamicCache(config=model.config)
    for index, layer in enumerate(single.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        assert keys is not None
        assert values is not None
        shared.update(
            keys.expand(batch_size, -1, -1, -1), values.expand(batch_size, -1, -1, -1), index
        )
    return shared


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """Steps, learning rate (cosine with warm-up), rows of each family in a step."""

    steps: int
    stop_after: int | None = None
    peak_learning_rate: float = 2e-3
    warmup_steps: int = 100
    weight_decay: float = 0.05
    rows_per_step: tuple[tuple[str, int], ...] = (("agent", 10), ("judge", 7), ("copy", 3))


def learning_rate(plan: TrainingPlan, step: int) -> float:
    """Linear warm-up, then a cosine down to 1% of the peak."""
    if step < plan.warmup_steps:
        return plan.peak_learning_rate * (step + 1) / plan.warmup_steps
    progress = (step - plan.warmup_steps) / max(1, plan.steps - plan.warmup_steps)
    return plan.peak_learning_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def train(
    model: Qwen3ForCausalLM,
    data: dict[str, FamilyData],
    plan: TrainingPlan,
    seed: int,
    report: Callable[[int, dict[str, float], float], None],
) -> None:
    """Train `model` in place. `report(step, loss per family, seconds since the start)` is called
    after every step.
    """
    rng = random.Random(seed)
    sources = {family: batches(data[family], size, rng) for family, size in plan.rows_per_step}
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=plan.peak_learning_rate,
        betas=(0.9, 0.98),
        weight_decay=plan.weight_decay,
    )
    model.train()
    started = time.monotonic()
    for step in range(plan.stop_after or plan.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(plan, step)
        optimizer.zero_grad(set_to_none=True)
        losses = {}
        total_weight = 0.0
        for family, source in sources.items():
            loss, weight = batch_loss(model, data[family].prefix, next(source))
            loss.backward()
            total_weight += weight
            losses[family] = loss.item() / weight
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(total_weight)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        report(step, losses, time.monotonic() - started)
    model.eval()
