"""A batch before its first gradient: micro-batches, the scores of teacher, reference and student,
and the figures of the whole batch that an objective asks for.

The student is the one before the step, so nothing here depends on micro-batches. Its pass is made
only where something must be known before the first gradient; what several passes over a batch
compare with is what the first of them found. Nothing here takes a step, and everything it gives is
detached.

Shapes: S turns, R tokens of the longest response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from records.types import ReadySample
from rollout_bridge.merging import PackedSequence, merge_turns
from trainer.batch.collate import (
    MicroBatch,
    TurnScores,
    micro_batches,
    pad_rows,
    score_batches,
    token_requests,
)
from trainer.batch.reward_view import reward_facts, view_rewards
from trainer.batch.side_sampling import Older, by_sampling_weights
from trainer.batch.token_batch import BatchContext, Correction
from trainer.batch.views import TeachingPlan, TurnView, remember_supports, support_ids, view_turns
from trainer.config import TrainerConfig
from trainer.model.policy import Policy
from trainer.model.token_states import LogprobModel, TokenRequest
from trainer.objectives.batch import NO_COUNTS, NO_STATISTICS, BatchStatistics, GlobalCounts
from trainer.objectives.normalise import normalise
from trainer.objectives.options import HindsightOpd, ObjectiveOptions
from trainer.objectives.policy.m2po import m2po_clip
from trainer.objectives.policy.policy_gradient import teacher_advantages


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedBatch(BatchContext):
    """A batch before its first gradient: everything here is detached. `requests` say which tokens
    each micro-batch asks the policy for. `lost` are the places of samples that the teacher could
    not score, `reward_metrics` those of rewards and lengths. `counts` are those of the batch before
    guards and rejection, `tokens_computed` go through the model, padding included.
    """

    batches: list[MicroBatch]
    requests: list[TokenRequest]
    reference: list[Tensor | None]
    lost: frozenset[int]
    reward_metrics: dict[str, float]
    counts: GlobalCounts
    tokens_computed: int

    def repeated(self, first: Mapping[int, TurnScores]) -> PreparedBatch:
        """This batch for the passes after its first, which found the scores `first` by turn: those
        of the student before the step.
        """
        before = [first[turn] for turn in range(len(self.views))]
        return replace(
            self,
            before=before if self.before is None else self.before,
            views=remember_supports(self.views, before),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """What is computed of a batch before its first gradient, because its objective or its
    correction asks for it: the `student` before the step, with its `student_top_k` likeliest
    tokens, the distance from the frozen start, log-probs by the weights that sampled, and figures
    of the whole batch. `report_top_k`: likeliest tokens in the step's own pass.
    """

    student: bool
    student_top_k: int
    start_kls: bool
    sampling_weights: bool
    statistics: bool
    report_top_k: int

    @staticmethod
    def of(config: TrainerConfig, plan: TeachingPlan, correction: Correction) -> Passes:
        """Those of a run; `plan` decides whose tokens a support has."""
        objective = config.objective
        if plan.support == "student":
            wants_top = plan.side_source is None
        else:
            wants_top = plan.support == "overlap" or objective.chooses_hints
        return Passes(
            student=(
                wants_top
                or objective.needs_batch_statistics
                or objective.charges_kl
                or objective.needs_sampling_weights
                or correction.needs_whole_batch
            ),
            student_top_k=plan.support_size if wants_top else 0,
            start_kls=objective.charges_kl,
            sampling_weights=objective.needs_sampling_weights,
            statistics=objective.needs_batch_statistics,
            report_top_k=plan.support_size if objective.compares_topk else 0,
        )


class BatchPreparation:
    """The models that score, and what for. `reference` is the frozen start, None if no KL needs it;
    `older` the policy at kept versions, None if not needed.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        reference: LogprobModel | None,
        config: TrainerConfig,
        plan: TeachingPlan,
        correction: Correction,
        older: Older | None = None,
    ) -> None:
        self._policy, self._reference, self._older = policy, reference, older
        self._config, self._plan, self._correction = config, plan, correction
        self._passes = Passes.of(config, plan, correction)

    @torch.no_grad()
    def prepare(
        self,
        samples: Sequence[ReadySample],
        version_gaps: Sequence[int] | None = None,
        sequences: Sequence[PackedSequence] | None = None,
        step: int = 0,
    ) -> PreparedBatch:
        """Micro-batches, and their scores by teacher, reference and the student before the step;
        `step` counts the steps before this one.
        """
        policy, config, plan, passes = self._policy, self._config, self._plan, self._passes
        gaps = version_gaps if version_gaps is not None else [0] * len(samples)
        shares = policy.shares_prefixes
        sequences = merge_turns(samples) if sequences is None else sequences
        batches = micro_batches(
            samples,
            sequences,
            config.micro_batch_tokens,
            plan.device,
            # Layers that are computed again keep only inputs, and each row's keys are as large;
            # what was measured for `memory_gb` is a row that shares nothing.
            groups_alike=shares and not policy.recomputes and config.memory_gb is None,
            shares=shares,
        )
        tokens_computed = sum(batch.num_tokens for batch in batches)
        before, start_kls, sampling = None, None, None
        if passes.student:
            before = score_batches(policy, batches, top_k=passes.student_top_k)
        reference: list[Tensor | None] = [None] * len(batches)
        if self._reference is not None:
            start = self._reference.token_logprobs
            reference = [start(batch.ids_BT, batch.mask_BT).logprobs_BT for batch in batches]
        if passes.start_kls:
            start_kls = _start_kls(batches, before, reference)
        if passes.sampling_weights:
            sampling = self._sampling_logprobs(samples, gaps, before)
        rewards = view_rewards(reward_facts(samples, start_kls), plan.options, step)
        views = view_turns(
            samples,
            plan,
            before,
            rewards,
            gaps,
            hold_weight=config.lesson_hold_weight,
            sampling=sampling,
        )
        lost = frozenset(index for index, view in enumerate(views) if view.lacks_scores)
        supports = None if plan.support == "none" else support_ids(views)
        requests = token_requests(
            batches,
            supports,
            top_k=passes.report_top_k,
            entropy_gradient=config.beta_entropy != 0,
        )
        counts = NO_COUNTS
        for batch in batches:
            counts = counts + GlobalCounts.of(batch.mask_BT, batch.turn_ids_BT)
        whole, statistics = None, NO_STATISTICS
        if self._correction.needs_whole_batch:
            whole = self._correction.whole_batch(views, before)
        if passes.statistics:
            statistics = batch_statistics(config.objective, views, before)
        return PreparedBatch(
            batches=batches,
            requests=requests,
            views=views,
            lost=lost,
            before=before,
            reference=reference,
            reward_metrics=rewards.metrics,
            counts=counts,
            tokens_computed=tokens_computed,
            correction=self._correction,
            whole=whole,
            statistics=statistics,
        )

    def _sampling_logprobs(
        self,
        samples: Sequence[ReadySample],
        gaps: Sequence[int],
        before: Sequence[TurnScores] | None,
    ) -> list[Tensor]:
        assert before is not None
        found = [scores.logprobs_sampled for scores in before]
        stale = [index for index, gap in enumerate(gaps) if gap > 0]
        scored = by_sampling_weights(
            [samples[index] for index in stale],
            [gaps[index] for index in stale],
            self._policy,
            self._older,
            lambda scores: (scores.logprobs_sampled,),
            max_tokens=self._config.micro_batch_tokens,
            device=self._plan.device,
        )
        for index, (logprobs,) in zip(stale, scored, strict=True):
            found[index] = logprobs
        return found


def _start_kls(
    batches: Sequence[MicroBatch],
    before: Sequence[TurnScores] | None,
    reference: Sequence[Tensor | None],
) -> list[float]:
    """Each response's log-prob under the policy minus that under the frozen start, in nats."""
    assert before is not None
    found: dict[int, float] = {}
    for batch, start_BT in zip(batches, reference, strict=True):
        assert start_BT is not None
        for turn, start in batch.gather(start_BT).items():
            apart = before[turn].logprobs - start
            # A token without a log-prob is dropped by the guards of the step.
            found[turn] = float(apart[torch.isfinite(apart)].sum())
    return [found[turn] for turn in range(len(found))]


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
