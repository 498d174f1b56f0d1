"""Puts one micro-batch together for the objective: model outputs, views of turns, corrections.

With one step per batch the student before the step is the student of the step itself, detached.

Shapes: B rows, T tokens, K tokens per position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.batch.collate import MicroBatch
from trainer.batch.correction import Correction, TurnCorrection
from trainer.batch.teach import TurnSupport
from trainer.batch.turn_scores import TurnScores
from trainer.batch.views import TurnView
from trainer.model.token_states import TokenLogprobs
from trainer.objectives.batch import BatchStatistics, Support, TokenBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """The objective's batch, and the log-probs [B, T] that rollout correction compared."""

    tokens: TokenBatch
    compared_BT: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchContext:
    """What all micro-batches of a pass share: views and scores by turn, corrections that depend on
    the whole batch, statistics of it.
    """

    views: Sequence[TurnView]
    before: Sequence[TurnScores] | None
    correction: Correction
    whole: Mapping[int, TurnCorrection] | None
    statistics: BatchStatistics


def assemble(
    batch: MicroBatch, now: TokenLogprobs, reference_BT: Tensor | None, context: BatchContext
) -> Assembled:
    """The objective's view of `batch`, whose log-probs under the policy are `now`."""
    views = context.views
    old_BT, old_sampled_BT = _old(batch, now, context.before)
    rollout_BT = batch.spread([view.rollout for view in views], fill=float("nan"))
    traits = context.correction.settings.traits
    compared_BT = old_sampled_BT
    if traits.train_logprobs == "current":
        compared_BT = now.logprobs_sampled_BT.detach()
    corrected = context.whole or context.correction.micro_batch(compared_BT, batch, views)
    weights = _spread_some(batch, {turn: one.weights for turn, one in corrected.items()})
    kept_BT = _spread_some(batch, {turn: one.mask for turn, one in corrected.items()})
    # The objective counts tokens without a finite log-prob of the trainer.
    kept_BT = torch.where(torch.isfinite(compared_BT), kept_BT, torch.ones_like(kept_BT))
    if traits.clip_anchor == "rollout":
        old_sampled_BT = torch.where(torch.isfinite(rollout_BT), rollout_BT, old_sampled_BT)
    tokens = TokenBatch(
        logprobs_BT=now.logprobs_BT,
        logprobs_sampled_BT=now.logprobs_sampled_BT,
        old_logprobs_BT=old_BT,
        old_logprobs_sampled_BT=old_sampled_BT,
        reference_logprobs_BT=reference_BT,
        teacher_logprobs_BT=batch.spread([view.teacher for view in views], fill=float("nan")),
        rollout_logprobs_BT=rollout_BT,
        entropy_BT=now.entropy_BT,
        mask_BT=batch.mask_BT * kept_BT,
        turn_ids_BT=batch.turn_ids_BT,
        opd_valid_BT=batch.spread([view.opd_valid for view in views], fill=0.0),
        reward_advantages_BT=batch.spread([view.reward_advantage for view in views], fill=0.0),
        weights_BT=weights,
        version_gap_BT=batch.spread([view.version_gap for view in views], fill=0.0),
        compared_logprobs_BT=compared_BT,
        support=_support(batch, now, views),
        statistics=context.statistics,
        emphasis_BT=_emphasis(batch, views),
        sampling_logprobs_BT=_sampling(batch, views),
    )
    return Assembled(tokens=tokens, compared_BT=compared_BT)


def _emphasis(batch: MicroBatch, views: Sequence[TurnView]) -> Tensor | None:
    """None where every turn counts alike."""
    if all(view.emphasis == 1.0 for view in views):
        return None
    return batch.spread([torch.full_like(one.rollout, one.emphasis) for one in views], fill=1.0)


def _sampling(batch: MicroBatch, views: Sequence[TurnView]) -> Tensor | None:
    """None where no objective asks for it."""
    known = [view.sampling for view in views if view.sampling is not None]
    return batch.spread(known, fill=0.0) if len(known) == len(views) else None


def _old(
    batch: MicroBatch, now: TokenLogprobs, before: Sequence[TurnScores] | None
) -> tuple[Tensor, Tensor]:
    """Log-probs before the step at temperature 1 and at the sampling temperature."""
    same = now.logprobs_sampled_BT is now.logprobs_BT
    if before is None:
        old_BT = now.logprobs_BT.detach()
        return old_BT, old_BT if same else now.logprobs_sampled_BT.detach()
    old_BT = batch.spread([score.logprobs for score in before], fill=0.0)
    if same:
        return old_BT, old_BT
    return old_BT, batch.spread([score.logprobs_sampled for score in before], fill=0.0)


def _support(batch: MicroBatch, now: TokenLogprobs, views: Sequence[TurnView]) -> Support | None:
    supports = [view.support for view in views]
    if now.support_BTK is None or any(support is None for support in supports):
        return None
    known: list[TurnSupport] = [support for support in supports if support is not None]
    old_BTK = now.support_BTK.detach()
    if all(support.old is not None for support in known):
        old = [support.old for support in known if support.old is not None]
        old_BTK = batch.spread(old, fill=0.0)
    return Support(
        ids_BTK=batch.spread([support.ids for support in known], fill=0),
        student_topk_ids_BTK=now.topk_ids_BTK,
        student_BTK=now.support_BTK,
        old_BTK=old_BTK,
        teacher_BTK=batch.spread([support.teacher for support in known], fill=0.0),
        valid_BTK=batch.spread([support.valid for support in known], fill=0.0),
    )


def _spread_some(batch: MicroBatch, turns: Mapping[int, Tensor]) -> Tensor:
    """Like `MicroBatch.spread`, 0 elsewhere, for values of only this micro-batch's turns."""
    result_BT = torch.zeros_like(batch.mask_BT)
    for row, sequence in enumerate(batch.sequences):
        for span in sequence.spans:
            result_BT[row, span.start : span.end] = turns[span.turn].to(result_BT.dtype)
    return result_BT
