"""One micro-batch put together for the objective, and the sums of what came back of all of them.

Model outputs, views of turns and rollout correction make the objective's batch. With one step per
batch the student before the step is the student of the step itself, detached.

In rollout correction a row is a turn, so no statistic crosses turns. A turn's weights depend on its
own tokens, so micro-batches are corrected one by one; only a normalisation over the batch needs all
of it first.

Shapes: B rows, T tokens, K tokens per position; S turns, R tokens of the longest response.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from records.training.step_results import TokenFigures
from records.types import Logprobs
from trainer.batch.collate import MicroBatch, TurnScores, pad_rows
from trainer.batch.token_figures import advantage_quantiles, token_figures
from trainer.batch.views import TurnSupport, TurnView
from trainer.model.token_states import TokenLogprobs
from trainer.objectives.batch import (
    NO_COUNTS,
    AggregationMode,
    BatchStatistics,
    GlobalCounts,
    Support,
    TokenBatch,
)
from trainer.objectives.frame import ObjectiveResult
from trainer.objectives.rollout_correction.correct import CorrectionResult, correct_rollout
from trainer.objectives.rollout_correction.settings import MODES, RolloutCorrectionSettings

BASE_KEYS = frozenset(
    f"rollout_corr/{name}"
    for name in ("kl", "k3_kl", "ppl_ratio", "chi2_token", "chi2_seq", "rollout_is_veto_fraction")
)
WEIGHT_KEYS = frozenset(
    f"rollout_corr/{name}"
    for name in ("rollout_is_mean", "rollout_is_eff_sample_size", "rollout_is_max")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCorrection:
    """One turn's detached weights [R] (1 where none are applied) and mask [R]."""

    weights: Tensor
    mask: Tensor


@dataclass(slots=True)
class CorrectionRows:
    """The log-probs that were compared, turn by turn, collected over a pass; if `fresh` is empty,
    all are of the newest weights.
    """

    train: dict[int, Tensor] = field(default_factory=dict)
    rollout: dict[int, Tensor] = field(default_factory=dict)
    after_tool: dict[int, Tensor] = field(default_factory=dict)
    fresh: dict[int, Tensor] = field(default_factory=dict)

    def add(self, batch: MicroBatch, train_BT: Tensor, views: Sequence[TurnView]) -> None:
        """The turns of one micro-batch, at the sampling temperature."""
        for turn, values in batch.gather(train_BT).items():
            self.train[turn] = values.detach()
            self.rollout[turn] = views[turn].rollout
            self.after_tool[turn] = views[turn].after_tool
            self.fresh[turn] = (views[turn].version_gap == 0).to(values.dtype)


class Correction:
    """The configured correction; stateless."""

    def __init__(self, settings: RolloutCorrectionSettings):
        self.settings = settings
        self.traits = MODES[settings.mode]
        has_weights = settings.importance_level is not None
        self.needs_whole_batch = settings.batch_normalize and has_weights
        """Whether weights depend on other turns of the batch."""
        self.expected_keys = BASE_KEYS | (WEIGHT_KEYS if has_weights else frozenset())
        """Metrics that every report has."""

    def whole_batch(
        self, views: Sequence[TurnView], before: Sequence[TurnScores] | None
    ) -> dict[int, TurnCorrection] | None:
        """Corrections of all turns at once, where they depend on each other."""
        if not self.needs_whole_batch:
            return None
        if before is None:
            raise ValueError("a normalisation over the batch needs a pass of the student first")
        train = {turn: score.logprobs_sampled for turn, score in enumerate(before)}
        return self._turns(train, views)

    def micro_batch(
        self, train_BT: Tensor, batch: MicroBatch, views: Sequence[TurnView]
    ) -> dict[int, TurnCorrection]:
        """Corrections of one micro-batch's turns; `train_BT` are the log-probs to compare."""
        return self._turns(batch.gather(train_BT.detach()), views)

    def report(self, rows: CorrectionRows) -> CorrectionResult:
        """Metrics and warnings of the whole batch."""
        return self._correct(rows.train, rows.rollout, rows.after_tool, rows.fresh or None)

    def _turns(
        self, train: dict[int, Tensor], views: Sequence[TurnView]
    ) -> dict[int, TurnCorrection]:
        after_tool = None
        if self.settings.post_tool_upper is not None:
            after_tool = {turn: views[turn].after_tool for turn in train}
        result = self._correct(train, {turn: views[turn].rollout for turn in train}, after_tool)
        corrected = {}
        for row, (turn, values) in enumerate(train.items()):
            length = len(values)
            weights = torch.ones_like(values)
            if result.weights_BT is not None:
                weights = result.weights_BT[row, :length].to(values.dtype)
            corrected[turn] = TurnCorrection(weights=weights, mask=result.mask_BT[row, :length])
        return corrected

    def _correct(
        self,
        train: dict[int, Tensor],
        rollout: dict[int, Tensor],
        after_tool: dict[int, Tensor] | None,
        fresh: dict[int, Tensor] | None = None,
    ) -> CorrectionResult:
        turns = list(train)
        # Of the turns, in the order of `train`.
        others = [
            None if values is None else pad_rows([values[turn] for turn in turns], 0.0)
            for values in (after_tool, fresh)
        ]
        return correct_rollout(
            pad_rows(list(train.values()), 0.0),
            pad_rows([rollout[turn] for turn in turns], float("nan")),
            pad_rows([torch.ones_like(one) for one in train.values()], 0.0),
            self.settings,
            after_tool_BT=others[0],
            fresh_BT=others[1],
        )


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
    traits = context.correction.traits
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


@dataclass(slots=True, kw_only=True)
class BatchTotals:
    """`reduced` are values under the objective's reduction, `sums` over tokens, `maxima` of them;
    `ranges` (smallest, largest) over tokens with a teacher, `advantages` [R] per turn, NaN where a
    token did not train, `figures` what else is stored about each token, `gaps` (sum of
    |teacher - student|, number of tokens with a teacher) per turn, `unnormalised` as in
    `BatchStatistics`, `rejected_turns` those that rollout correction rejected as a whole.
    """

    reduced: dict[str, float] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    counts: GlobalCounts = NO_COUNTS
    advantages: dict[int, Logprobs] = field(default_factory=dict)
    figures: dict[int, TokenFigures] = field(default_factory=dict)
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
        self.figures |= token_figures(result, assembled.tokens, assembled.compared_BT, batch)
        masks = batch.gather(result.mask_BT)
        for turn, gap in batch.gather(result.gap_BT).items():
            used = masks[turn] > 0
            taught = (views[turn].opd_valid * masks[turn]).double().sum()
            self.gaps[turn] = (gap[used].double().abs().sum().item(), taught.item())
        for turn, kept in batch.gather(assembled.tokens.mask_BT).items():
            if not bool((kept > 0).any()):
                self.rejected_turns.add(turn)

    def renormalise(self, planned: GlobalCounts, mode: AggregationMode) -> float:
        """What guards and rejection removed leaves the denominator as well: divide by what is left
        of the `planned` counts. Returns the factor, for the gradients; 1 changes nothing.
        """
        factor = planned.denominator(mode) / max(self.counts.denominator(mode), 1.0)
        if factor == 1.0 or self.counts.tokens == 0:
            return 1.0
        self.reduced = {name: value * factor for name, value in self.reduced.items()}
        return factor

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
        """Reduced values; moments and quantiles of the advantages over the tokens that trained."""
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
            | advantage_quantiles(list(self.advantages.values()))
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
