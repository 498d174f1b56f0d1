"""Rows of slime's training data as the embedded trainer's micro-batches.

A row's response (everything after its first prompt) stands in columns 1 to R of a row of tensors;
column 0 is the last token of that prompt, since no first token of a sequence has a log-prob. What
the hooks know of a row hangs on its `rollout_log_probs` tensor, the one value that slime passes on
unchanged to its loss and to the correction.

Shapes: R tokens of a row's response, r those of them that this rank holds; B rows, T columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollout_bridge.merging import PackedSequence, TurnSpan
from rollout_bridge.slime.carrier import CarriedTurn, RowCarrier
from trainer.batch.collate import MicroBatch, TurnScores, build_micro_batch, comparable
from trainer.batch.views import TurnView, untaught
from trainer.config import TrainerConfig
from trainer.objectives.batch import BatchStatistics, GlobalCounts
from trainer.slime.last_batch import StepFigures
from trainer.slime.ranks import Ranks

_STATE = "hindsight"


@dataclass(slots=True, kw_only=True)
class Step:
    """One training step on this rank; what all its micro-batches share.

    `scale` undoes the division that slime makes by its number of rollouts. `comparable_share` is
    the share of the loss, under its reduction, whose rollout log-probs can be compared. `epoch`
    counts the steps on the same batch, from 0; `before` has the scores by view of each row before
    the first of them, which that step notes for the others; `figures` is for the next batch to
    report. The rest says whether the distillation term has a gradient: rows seen, tokens with one,
    sum of |A|.
    """

    trainer: TrainerConfig
    counts: GlobalCounts
    statistics: BatchStatistics
    scale: float
    num_rows: int
    comparable_share: float
    advantage_sum: float
    epoch: int = 0
    before: dict[int, tuple[TurnScores, ...]] = field(default_factory=dict)
    figures: StepFigures = field(default_factory=StepFigures)
    seen: set[int] = field(default_factory=set)
    gradient_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RowState:
    """A row with the views of its turns; a row without turns has one view of its whole response,
    whose loss mask is 0.
    """

    index: int
    carrier: RowCarrier
    views: tuple[TurnView, ...]
    total_length: int
    response_length: int
    step: Step


def attach(values: Tensor, state: RowState) -> None:
    """Hang `state` on a row's `rollout_log_probs`."""
    setattr(values, _STATE, state)


def attached(rollout_log_probs: Sequence[Tensor] | None) -> list[RowState]:
    """The states of a micro-batch's rows. Raises ValueError where the advantage hook did not run
    on these tensors.
    """
    states = [getattr(values, _STATE, None) for values in rollout_log_probs or ()]
    if not states or any(state is None for state in states):
        raise ValueError(
            "rows of slime's batch carry no data on their turns: set "
            "--custom-advantage-function-path trainer.slime.hooks.advantage_hook, and let nothing "
            "replace rollout_log_probs after it"
        )
    return [state for state in states if isinstance(state, RowState)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBatch:
    """Some rows as one micro-batch; spans and ids of turns count over `views`."""

    states: list[RowState]
    batch: MicroBatch
    views: list[TurnView]

    def columns(self, rows: Sequence[Tensor]) -> Tensor:
        """[R] or [R, K] of each row -> [B, T] or [B, T, K], 0 elsewhere, with gradient."""
        width = self.batch.ids_BT.shape[1]
        padded = []
        for row in rows:
            after = (0, 0) * (row.dim() - 1)
            padded.append(torch.nn.functional.pad(row, (*after, 1, width - 1 - len(row))))
        return torch.stack(padded)

    def rows(self, columns_BT: Tensor) -> list[Tensor]:
        """The inverse: [R] of each row."""
        return [
            columns_BT[place, 1 : 1 + state.response_length]
            for place, state in enumerate(self.states)
        ]


def carried(rows: RowBatch) -> list[tuple[int, CarriedTurn]]:
    """The turns, each with the place of its view; views of rows without turns are skipped."""
    turns: list[tuple[int, CarriedTurn]] = []
    place = 0
    for state in rows.states:
        turns += enumerate(state.carrier.turns, start=place)
        place += len(state.views)
    return turns


def row_batch(states: Sequence[RowState], masks: Sequence[Tensor], device: Any) -> RowBatch:
    """The micro-batch of these rows; `masks` [R] are slime's loss masks."""
    sequences, views, temperatures = [], [], []
    for state in states:
        ids = np.zeros(1 + state.response_length, dtype=np.int32)
        spans = []
        if not state.carrier.turns:
            spans.append(TurnSpan(turn=len(views), start=1, end=1 + state.response_length))
            temperatures.append(1.0)
        else:
            shift = 1 - state.carrier.prompt_length
            for turn in state.carrier.turns:
                start, end = turn.start + shift, turn.end + shift
                ids[start:end] = turn.sample.response_ids
                place = len(views) + len(spans)
                spans.append(TurnSpan(turn=place, start=start, end=end))
                is_comparable = comparable(turn.sample)
                temperatures.append(turn.sample.temperature if is_comparable else 1.0)
        views.extend(state.views)
        sequences.append(PackedSequence(ids=ids, spans=tuple(spans)))
    batch = build_micro_batch(sequences, device, temperatures)
    result = RowBatch(states=list(states), batch=batch, views=views)
    mask_BT = result.columns([mask.to(device=device, dtype=torch.float32) for mask in masks])
    return replace(result, batch=replace(batch, mask_BT=batch.mask_BT * mask_BT))


def filler_view(length: int, support_size: int, device: Any) -> TurnView:
    """The view of a row that fills up a batch: nothing in it counts."""
    taught = untaught(length, support_size, device)
    nan = torch.full((length,), torch.nan, device=device)
    zeros = torch.zeros(length, device=device)
    return TurnView(
        rollout=nan,
        teacher=taught.logprobs,
        opd_valid=zeros,
        reward_advantage=zeros,
        after_tool=zeros,
        version_gap=zeros,
        support=taught.support,
    )


def joined(values: Sequence[Tensor], states: Sequence[RowState], ranks: Ranks) -> list[Tensor]:
    """[r, ...] of each row -> [R, ...]."""
    return [
        ranks.join(one, state.total_length, state.response_length)
        for one, state in zip(values, states, strict=True)
    ]


def parted(values: Sequence[Tensor], states: Sequence[RowState], ranks: Ranks) -> list[Tensor]:
    """[R, ...] of each row -> [r, ...]."""
    return [
        ranks.part(one, state.total_length, state.response_length)
        for one, state in zip(values, states, strict=True)
    ]
