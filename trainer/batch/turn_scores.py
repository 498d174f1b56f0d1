"""Scores of whole batches, turn by turn, without gradients: the policy before a step, a teacher.

A row of a batch may contain several turns, and a turn's hinted prompt is not the sequence that it
was sampled in. Here everything is split into one record per turn. The objective's batch is put
together from these again (collate.MicroBatch.spread).

Shapes: R tokens of a turn's response, K tokens per position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from records.types import Ids
from rollout_bridge.merging import PackedSequence, TurnSpan
from trainer.batch.collate import MicroBatch, build_micro_batch, plan_micro_batches
from trainer.model.token_states import LogprobModel, TokenLogprobs, TokenRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnScores:
    """One turn's detached log-probs [R], and what else was asked for [R, K]."""

    logprobs: Tensor
    logprobs_sampled: Tensor
    support: Tensor | None = None
    topk_ids: Tensor | None = None
    topk: Tensor | None = None
    drawn_ids: Tensor | None = None
    drawn: Tensor | None = None


def split_turns(scores: TokenLogprobs, batch: MicroBatch) -> dict[int, TurnScores]:
    """The scores of a micro-batch by turn."""
    fields = {
        "logprobs": scores.logprobs_BT,
        "logprobs_sampled": scores.logprobs_sampled_BT,
        "support": scores.support_BTK,
        "topk_ids": scores.topk_ids_BTK,
        "topk": scores.topk_BTK,
        "drawn_ids": scores.drawn_ids_BTK,
        "drawn": scores.drawn_BTK,
    }
    columns = {
        name: batch.gather(values.detach()) for name, values in fields.items() if values is not None
    }
    return {
        turn: TurnScores(**{name: values[turn] for name, values in columns.items()})
        for turn in columns["logprobs"]
    }


@torch.no_grad()
def score_batches(
    model: LogprobModel,
    batches: Sequence[MicroBatch],
    *,
    support_ids: Sequence[Tensor] | None = None,
    top_k: int = 0,
    draw: int = 0,
    generator: torch.Generator | None = None,
) -> list[TurnScores]:
    """Scores of every turn of `batches`, in the order of the samples; `support_ids` [R, K] each."""
    found: dict[int, TurnScores] = {}
    for batch in batches:
        request = TokenRequest(
            support_ids_BTK=None if support_ids is None else batch.spread(support_ids, fill=0),
            top_k=top_k,
            draw=draw,
            generator=generator,
        )
        scores = model.token_logprobs(batch.ids_BT, batch.mask_BT, batch.temperatures_BT, request)
        found |= split_turns(scores, batch)
    return [found[turn] for turn in range(len(found))]


def score_responses(
    model: LogprobModel,
    prompts: Sequence[Ids],
    responses: Sequence[Ids],
    *,
    max_tokens: int,
    device: torch.device | str,
    support_ids: Sequence[Tensor] | None = None,
    top_k: int = 0,
    draw: int = 0,
) -> list[TurnScores]:
    """Scores of each response after its own prompt, at temperature 1."""
    sequences = []
    for index, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        ids = np.concatenate([prompt, response])
        span = TurnSpan(turn=index, start=len(prompt), end=len(ids))
        sequences.append(PackedSequence(ids=ids, spans=(span,)))
    groups = plan_micro_batches(sequences, max_tokens)
    batches = [build_micro_batch(group, device) for group in groups]
    return score_batches(model, batches, support_ids=support_ids, top_k=top_k, draw=draw)
