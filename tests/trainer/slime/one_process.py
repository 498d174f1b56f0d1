"""slime's part of a step, in one process and without slime: what its trainer gives the hooks."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from records.types import ReadySample
from rollout_bridge.merging import PackedSequence
from rollout_bridge.slime.carrier import build
from tests.trainer.tiny import VOCAB
from trainer.config import TrainerConfig
from trainer.slime.advantages.of_rank import RankAdvantages, prepare
from trainer.slime.loss import micro_batch_loss

ROWS = ("total_lengths", "response_lengths", "loss_masks", "rollout_log_probs", "ref_log_probs")


class OneProcess:
    """The ranks of a job that has one of each: all of it here."""

    context_size = 1
    is_first = True

    def scoring_places(self, args: Any, batch: dict[str, Any], num_places: int) -> list[Tensor]:
        """As `Ranks.scoring_places`: one row behind the other, and padding behind the last."""
        places, end = [], 0
        lengths = zip(batch["total_lengths"], batch["response_lengths"], strict=True)
        for total_length, response_length in lengths:
            end += total_length
            # The place of a token scores the next one.
            places.append(torch.arange(end - response_length - 1, end - 1))
        return places

    def join(self, part: Tensor, total_length: int, response_length: int) -> Tensor:
        """As `Ranks.join`."""
        return part

    def part(self, whole: Tensor, total_length: int, response_length: int) -> Tensor:
        """As `Ranks.part`."""
        return whole

    def of_all(self, own: Any) -> list[Any]:
        """As `Ranks.of_all`."""
        return [own]

    def vocabulary_start(self, size: int) -> int:
        """As `Ranks.vocabulary_start`."""
        return 0

    def vocabulary_sum(self, values: Tensor) -> Tensor:
        """As `Ranks.vocabulary_sum`."""
        return values

    def vocabulary_max(self, values: Tensor) -> Tensor:
        """As `Ranks.vocabulary_max`."""
        return values

    def vocabulary_parts(self, values: Tensor) -> list[Tensor]:
        """As `Ranks.vocabulary_parts`."""
        return [values]


def arguments(**changes: Any) -> Namespace:
    values = {"loss_type": "custom_loss", "vocab_size": VOCAB, "rollout_temperature": 1.0}
    return Namespace(**values | changes)


def logits_of(model: nn.Module, tokens: Sequence[Tensor]) -> Tensor:
    """[1, T, V]: rows one after the other."""
    rows = [model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0].float() for ids in tokens]
    return torch.cat(rows).unsqueeze(0)


def log_probs_of(logits: Tensor, data: dict[str, Any]) -> list[Tensor]:
    """[R] of each row, at temperature 1."""
    places = OneProcess().scoring_places(None, data, logits.shape[1])
    return [
        torch.log_softmax(logits[0, rows], dim=-1)
        .gather(-1, ids[-len(rows) :].unsqueeze(-1))
        .squeeze(-1)
        for rows, ids in zip(places, data["tokens"], strict=True)
    ]


def rollout_data(
    samples: Sequence[ReadySample],
    rows: Sequence[PackedSequence],
    model: nn.Module,
    start: nn.Module | None = None,
    version_gaps: Sequence[int] | None = None,
    epochs: int = 1,
    step: int = 0,
) -> dict[str, Any]:
    """What slime's trainer has of these rows, once for each step, before it asks for advantages."""
    gaps = version_gaps or [0] * len(samples)
    carriers = build(samples, rows, gaps, epochs, step=step) * epochs
    num_rows, rows = len(rows), [*rows] * epochs
    masks = [torch.tensor(carrier.loss_mask(), dtype=torch.int) for carrier in carriers]
    data: dict[str, Any] = {
        "tokens": [torch.from_numpy(row.ids).long() for row in rows],
        "total_lengths": [len(row.ids) for row in rows],
        "response_lengths": [carrier.response_length for carrier in carriers],
        "loss_masks": masks,
        "rollout_mask_sums": torch.stack([mask.sum().float() for mask in masks]),
        "rollout_log_probs": [torch.from_numpy(one.rollout_logprobs()) for one in carriers],
        "prompt": carriers,
        "num_microbatches": [1] * epochs,
        "global_batch_sizes": [num_rows] * epochs,
    }
    with torch.no_grad():
        data["log_probs"] = log_probs_of(logits_of(model, data["tokens"]), data)
        if start is not None:
            data["ref_log_probs"] = log_probs_of(logits_of(start, data["tokens"]), data)
    return data


def step(
    trainer: TrainerConfig, data: dict[str, Any], model: nn.Module, batches: Sequence[Sequence[int]]
) -> tuple[RankAdvantages, dict[str, float]]:
    """Advantages, then the loss of each of `batches` (places of rows) backwards, as slime and
    Megatron scale it; metrics as slime reduces them.
    """
    prepared = prepare(arguments(), data, trainer, OneProcess())
    return prepared, backward(data, model, batches)


def backward(
    data: dict[str, Any], model: nn.Module, batches: Sequence[Sequence[int]]
) -> dict[str, float]:
    """The gradients of one step on these places of rows, and its metrics."""
    args = arguments()
    size = data["global_batch_sizes"][0]
    metrics: dict[str, float] = {}
    for places in batches:
        batch = {key: [data[key][i] for i in places] for key in ROWS if key in data}
        logits = logits_of(model, [data["tokens"][i] for i in places])
        loss, values = micro_batch_loss(args, batch, logits, OneProcess())
        (loss / size).backward()
        for key, value in values.items():
            metrics[key] = metrics.get(key, 0.0) + float(value) / size
    return metrics
