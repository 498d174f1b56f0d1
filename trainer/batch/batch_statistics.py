"""Figures of the whole batch that an objective needs before its first gradient.

They come from the student before the step, so that they do not depend on micro-batches.

Shapes: S turns, R tokens of the longest response.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.batch.turn_scores import TurnScores
from trainer.batch.turn_view import TurnView, pad_rows
from trainer.objectives.batch import NO_STATISTICS, BatchStatistics
from trainer.objectives.normalise import normalise
from trainer.objectives.options import HindsightOpd, ObjectiveOptions
from trainer.objectives.policy.m2po import m2po_clip
from trainer.objectives.policy.policy_gradient import teacher_advantages


def batch_statistics(
    options: ObjectiveOptions, views: Sequence[TurnView], before: Sequence[TurnScores] | None
) -> BatchStatistics:
    """What `options` ask for; raises ValueError without the pass that it needs."""
    if not isinstance(options, HindsightOpd) or not options.needs_batch_statistics:
        return NO_STATISTICS
    if before is None:
        raise ValueError("statistics of the batch need a pass of the student before the step")
    valid_SR = pad_rows([view.opd_valid for view in views], 0.0)
    mask_SR = pad_rows([torch.ones_like(view.opd_valid) for view in views], 0.0)
    gaps = [
        teacher_advantages(view.teacher, score.logprobs, options)
        for view, score in zip(views, before, strict=True)
    ]
    gap_SR = pad_rows(gaps, 0.0)
    # A token without a finite log-prob of the trainer leaves the loss, and its moments.
    valid_SR = valid_SR * torch.isfinite(gap_SR)
    gap_SR = torch.where(valid_SR > 0, gap_SR, torch.zeros_like(valid_SR))
    mean, std, unnormalised = float("nan"), float("nan"), float("nan")
    if options.normalise:
        found = normalise(gap_SR, valid_SR)
        # Too few tokens, or all alike: left as they are.
        mean, std = (float(found.mean), float(found.std)) if found.applied else (0.0, 1.0)
        gap_SR, unnormalised = found.values, float(found.num_unnormalised)
    if options.surrogate != "m2po":
        return BatchStatistics(gap_mean=mean, gap_std=std, unnormalised=unnormalised)
    reward_SR = pad_rows([view.reward_advantage for view in views], 0.0)
    train_SR = pad_rows([score.logprobs_sampled for score in before], 0.0)
    finite_SR = torch.isfinite(train_SR)
    train_SR, mask_SR = (
        torch.where(finite_SR, train_SR, torch.zeros_like(train_SR)),
        mask_SR * finite_SR,
    )
    clip = m2po_clip(
        train_SR,
        _comparable(pad_rows([view.rollout for view in views], float("nan")), train_SR),
        options.opd_coef * gap_SR + options.reward_coef * reward_SR,
        mask_SR,
        budget=options.second_moment_budget,
    )
    return BatchStatistics(
        gap_mean=mean,
        gap_std=std,
        unnormalised=unnormalised,
        clip_low=clip.clip_low,
        clip_high=clip.clip_high,
    )


def _comparable(rollout_SR: Tensor, train_SR: Tensor) -> Tensor:
    """A token that cannot be compared has ratio 1."""
    return torch.where(torch.isfinite(rollout_SR), rollout_SR, train_SR)
