"""A rank's rows as the objective sees them before the step, and the figures of all ranks together.

It knows log-probs and what correction removes, from which the loss's denominators follow. It does
not know advantages. Ranks exchange a few numbers per token once.

Shapes: R tokens of a row's response; B rows, T columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rollout_bridge.slime.carrier import RowCarrier
from trainer.batch.collate import TurnScores, comparable
from trainer.batch.token_batch import BatchContext, Correction, assemble
from trainer.batch.views import TurnView
from trainer.config import TrainerConfig
from trainer.model.token_states import TokenLogprobs
from trainer.objectives.batch import (
    NO_STATISTICS,
    BatchStatistics,
    GlobalCounts,
    TokenBatch,
    select_finite,
)
from trainer.slime.advantages.checks import RankFigures, check_complete, check_finite
from trainer.slime.batch_metrics import TurnFigures
from trainer.slime.ranks import Ranks
from trainer.slime.rows import RowBatch, Step, carried
from trainer.step.preparation import batch_statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsBefore:
    """This rank's rows before the step: `tokens` without those that are not finite, whose number is
    `num_nonfinite`, and what other ranks need of the turns.
    """

    tokens: TokenBatch
    num_nonfinite: float
    turns: list[TurnFigures]


def before_step(local: RowBatch, logprobs: Sequence[Tensor], trainer: TrainerConfig) -> RowsBefore:
    """`logprobs` [R]: the policy's, of each row's response."""
    views = _views_at_temperature_1(local)
    old_BT = local.columns(logprobs)
    now = TokenLogprobs(
        logprobs_BT=old_BT, logprobs_sampled_BT=old_BT, entropy_BT=torch.zeros_like(old_BT)
    )
    context = BatchContext(
        views=views,
        before=None,
        correction=Correction(trainer.correction.settings()),
        whole=None,
        statistics=NO_STATISTICS,
    )
    assembled = assemble(local.batch, now, None, context).tokens
    figures = _figures(local, views, old_BT, assembled.mask_BT)
    clean, num_nonfinite = select_finite(assembled)
    return RowsBefore(tokens=clean, num_nonfinite=float(num_nonfinite), turns=figures)


def _views_at_temperature_1(local: RowBatch) -> list[TurnView]:
    """Rollout log-probs at another temperature cannot be compared here: they are NaN."""
    views = list(local.views)
    for place, turn in carried(local):
        if comparable(turn.sample) and turn.sample.temperature != 1.0:
            view = views[place]
            views[place] = replace(view, rollout=torch.full_like(view.rollout, torch.nan))
    return views


def _figures(
    local: RowBatch, views: Sequence[TurnView], old_BT: Tensor, mask_BT: Tensor
) -> list[TurnFigures]:
    """What other ranks need of this rank's turns; `mask_BT` is what correction has left."""
    old = local.batch.gather(old_BT)
    kept = local.batch.gather(mask_BT)
    return [
        TurnFigures(
            index=turn.index,
            old=old[place].cpu(),
            rollout=views[place].rollout.cpu(),
            teacher=views[place].teacher.cpu(),
            opd_valid=views[place].opd_valid.cpu(),
            num_rejected=float((1.0 - kept[place]).sum()),
            is_comparable=comparable(turn.sample),
            temperature=turn.sample.temperature,
            after_tool=turn.sample.after_tool,
            version_gap=turn.version_gap,
        )
        for place, turn in carried(local)
    ]


def agree(
    rows: RowsBefore, carriers: Sequence[RowCarrier], step: Step, ranks: Ranks
) -> RankFigures:
    """The figures of all ranks as one; sets the counts and statistics of `step`.

    Raises ValueError if turns of the batch are missing or occur twice, NonFiniteError if too many
    tokens are not finite.
    """
    counts = GlobalCounts.of(rows.tokens.mask_BT, rows.tokens.turn_ids_BT)
    facts = carriers[0].batch
    own = RankFigures(facts.without_histories(), counts, rows.turns, rows.num_nonfinite)
    parts: list[RankFigures] = ranks.of_all(own)
    check_complete(parts, carriers)
    for part in parts:
        step.counts = step.counts + part.counts
    everything = RankFigures(
        facts,
        step.counts,
        [one for part in parts for one in part.turns],
        sum(part.nonfinite for part in parts),
    )
    check_finite(everything.nonfinite, step.counts.tokens, step.trainer)
    step.statistics = _statistics(step.trainer, everything.turns)
    return everything


def _statistics(trainer: TrainerConfig, everything: Sequence[TurnFigures]) -> BatchStatistics:
    """Statistics of the gap over the turns of all ranks."""
    if not trainer.objective.needs_batch_statistics or not everything:
        return NO_STATISTICS
    views, before = [], []
    for one in sorted(everything, key=lambda figures: figures.index):
        nothing = torch.zeros_like(one.old)
        views.append(
            TurnView(
                rollout=one.rollout,
                teacher=one.teacher,
                opd_valid=one.opd_valid,
                reward_advantage=nothing,
                after_tool=nothing,
                version_gap=nothing,
                support=None,
            )
        )
        before.append(TurnScores(logprobs=one.old, logprobs_sampled=one.old))
    return batch_statistics(trainer.objective, views, before)
