"""Figures of a whole batch: what an objective needs before its first gradient, and sums over the
micro-batches of one pass.

The former come from the student before the step, so that they do not depend on micro-batches.

Shapes: S turns, R tokens of the longest response.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from records.types import Logprobs
from trainer.batch.collate import MicroBatch, pad_rows
from trainer.batch.correction import CorrectionRows
from trainer.batch.token_batch import Assembled
from trainer.batch.turn_scores import TurnScores
from trainer.batch.views import TurnView
from trainer.objectives.batch import NO_STATISTICS, BatchStatistics, GlobalCounts
from trainer.objectives.frame import ObjectiveResult
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


@dataclass(slots=True, kw_only=True)
class BatchTotals:
    """`reduced` are values under the objective's reduction, `sums` over tokens, `maxima` of them;
    `ranges` (smallest, largest) over tokens with a teacher, `advantages` [R] per turn, NaN where a
    token did not train, `gaps` (sum of |teacher - student|, number of tokens with a teacher) per
    turn, `unnormalised` as in `BatchStatistics`, `rejected_turns` those that rollout correction
    rejected as a whole.
    """

    reduced: dict[str, float] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    counts: GlobalCounts = field(
        default_factory=lambda: GlobalCounts(turns=0, sequences=0, tokens=0.0)
    )
    advantages: dict[int, Logprobs] = field(default_factory=dict)
    gaps: dict[int, tuple[float, float]] = field(default_factory=dict)
    rows: CorrectionRows = field(default_factory=CorrectionRows)
    num_taught_turns: int = 0
    rejected_tokens: float = 0.0
    rejected_turns: set[int] = field(default_factory=set)
    unnormalised: float = math.nan

    def add(
        self,
        result: ObjectiveResult,
        assembled: Assembled,
        batch: MicroBatch,
        views: Sequence[TurnView],
    ) -> None:
        """Account for one micro-batch."""
        for name, value in result.reduced.items():
            self.reduced[name] = self.reduced.get(name, 0.0) + value.item()
        for name, value in result.token_sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value.item()
        for name, value in result.token_max.items():
            self.maxima[name] = max(self.maxima.get(name, 0.0), value.item())
        for name, (low, high) in result.token_ranges.items():
            least, most = self.ranges.get(name, (math.inf, -math.inf))
            self.ranges[name] = (min(least, low.item()), max(most, high.item()))
        self.counts = self.counts + result.counts
        self.rejected_tokens += float(batch.mask_BT.sum() - assembled.tokens.mask_BT.sum())
        self.rows.add(batch, assembled.compared_BT, views)
        nan_BT = torch.full_like(result.advantages_BT, float("nan"))
        advantages_BT = torch.where(result.mask_BT > 0, result.advantages_BT, nan_BT)
        for turn, values in batch.gather(advantages_BT).items():
            self.advantages[turn] = values.cpu().numpy().copy()
            self.num_taught_turns += int(bool((views[turn].opd_valid > 0).any()))
        masks = batch.gather(result.mask_BT)
        for turn, gap in batch.gather(result.gap_BT).items():
            used = masks[turn] > 0
            taught = (views[turn].opd_valid * masks[turn]).double().sum()
            self.gaps[turn] = (gap[used].double().abs().sum().item(), taught.item())
        for turn, kept in batch.gather(assembled.tokens.mask_BT).items():
            if not bool((kept > 0).any()):
                self.rejected_turns.add(turn)

    @property
    def mean_gap(self) -> float:
        """Mean |teacher - student| of the sampled tokens, over those that have a teacher; NaN
        without any.
        """
        taught = self.sums["tokens_with_teacher"]
        return self.sums["gap_abs"] / taught if taught > 0 else math.nan

    def mean_gap_of(self, turns: Iterable[int]) -> float:
        """The same over some turns of the batch."""
        found = [self.gaps[turn] for turn in turns]
        taught = sum(number for _, number in found)
        return sum(gap for gap, _ in found) / taught if taught > 0 else math.nan

    def statistics(self) -> dict[str, float]:
        """Reduced values, and moments of the advantages over the tokens that trained."""
        count = max(self.sums["tokens"], 1.0)
        mean = self.sums["adv"] / count
        variance = max(self.sums["adv_squared"] / count - mean * mean, 0.0)
        ranges = {
            f"{name}_{end}": value
            for name, both in self.ranges.items()
            for end, value in zip(("min", "max"), both, strict=True)
        }
        return (
            _means_over_some(self.reduced)
            | ranges
            | {
                "opd/adv_mean": mean,
                "opd/adv_std": math.sqrt(variance),
                "opd/adv_abs_max": self.maxima["adv_abs_max"],
                "opd/adv_pos_frac": self.sums["adv_positive"] / count,
                "teacher_student_absdiff": self.mean_gap,
                "ratio_max": self.maxima["ratio_max"],
            }
        )


PARTIAL = {
    "train_rollout_logprob_abs_diff": "rollout_comparable_frac",
    "opd/overlap_token_advantage": "opd/overlapping_frac",
}
"""Means over some of the tokens only, and the share of these tokens."""


def _means_over_some(reduced: dict[str, float]) -> dict[str, float]:
    """Divides each by its share; NaN where no token has such a value."""
    found = dict(reduced)
    for name, share in PARTIAL.items():
        if name in reduced:
            found[name] = reduced[name] / reduced[share] if reduced[share] > 0 else math.nan
    return found
