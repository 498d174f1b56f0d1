"""A batch before its first gradient: micro-batches, the scores of teacher, reference and student,
and the figures of the whole batch that an objective asks for.

The student is the one before the step, so nothing here depends on micro-batches. It takes no step,
and everything it gives is detached.

Shapes: S turns, R tokens of the longest response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
)
from trainer.batch.side_sampling import Older, by_sampling_weights
from trainer.batch.token_batch import BatchContext, Correction
from trainer.batch.views import TeachingPlan, TurnSupport, TurnView, remember_supports, view_turns
from trainer.config import TrainerConfig
from trainer.model.policy import Policy
from trainer.model.token_states import LogprobModel
from trainer.objectives.batch import NO_STATISTICS, BatchStatistics
from trainer.objectives.normalise import normalise
from trainer.objectives.options import HindsightOpd, ObjectiveOptions
from trainer.objectives.policy.m2po import m2po_clip
from trainer.objectives.policy.policy_gradient import teacher_advantages


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedBatch:
    """A batch before its first gradient: everything here is detached. `start_kls`: each response's
    log-prob under the policy minus that under the frozen start, in nats, if rewards are charged for
    it.
    """

    batches: list[MicroBatch]
    views: list[TurnView]
    before: list[TurnScores] | None
    reference: list[Tensor | None]
    start_kls: list[float] | None

    def context(self, options: ObjectiveOptions, correction: Correction) -> BatchContext:
        """What all of its micro-batches share. Raises ValueError without the pass of the student,
        where figures of the whole batch need it.
        """
        return BatchContext(
            views=self.views,
            before=self.before,
            correction=correction,
            whole=correction.whole_batch(self.views, self.before),
            statistics=batch_statistics(options, self.views, self.before),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPreparation:
    """The models that score, and what for. `reference` is the frozen start, None if no KL needs it;
    `older` the policy at kept versions, None if not needed.
    """

    policy: Policy
    reference: LogprobModel | None
    config: TrainerConfig
    plan: TeachingPlan
    correction: Correction
    older: Older | None = None

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
        packed = merge_turns(samples) if sequences is None else sequences
        shares = self.policy.shares_prefixes
        batches = micro_batches(
            samples,
            packed,
            self.config.micro_batch_tokens,
            self.policy.device,
            # Layers that are computed again keep only inputs, and each row's keys are as large;
            # what was measured for `memory_gb` is a row that shares nothing.
            groups_alike=shares and not self.policy.recomputes and self.config.memory_gb is None,
            shares=shares,
        )
        before = self._score_before(batches)
        reference = [self._reference_logprobs(batch) for batch in batches]
        start_kls = self._start_kls(batches, before, reference)
        gaps = version_gaps if version_gaps is not None else [0] * len(samples)
        sampling = self._sampling_logprobs(samples, gaps, before)
        views = view_turns(
            samples,
            self.plan,
            before,
            gaps,
            hold_weight=self.config.lesson_hold_weight,
            step=step,
            start_kls=start_kls,
            sampling=sampling,
        )
        if self.config.epochs_per_batch > 1 and self.config.objective.support == "teacher":
            views = self._remember_supports(batches, views)
        return PreparedBatch(
            batches=batches,
            views=views,
            before=before,
            reference=reference,
            start_kls=start_kls,
        )

    @property
    def _looks_before(self) -> bool:
        """Whether the student is scored before the step, apart from the step's own forward pass."""
        return (
            self.config.epochs_per_batch > 1
            or self._wants_student_top
            or self.config.objective.needs_batch_statistics
            or self.config.objective.charges_kl
            or self.config.objective.needs_sampling_weights
            or self.correction.needs_whole_batch
        )

    def _score_before(self, batches: Sequence[MicroBatch]) -> list[TurnScores] | None:
        if not self._looks_before:
            return None
        size = self.plan.support_size if self._wants_student_top else 0
        return score_batches(self.policy, batches, top_k=size)

    @property
    def _wants_student_top(self) -> bool:
        """Whether the student's likeliest tokens before the step are the support, or choose it."""
        objective = self.config.objective
        if objective.support == "student":
            return self.plan.side_source is None
        return objective.support == "overlap" or objective.chooses_hints

    def _sampling_logprobs(
        self,
        samples: Sequence[ReadySample],
        gaps: Sequence[int],
        before: Sequence[TurnScores] | None,
    ) -> list[Tensor] | None:
        if not self.config.objective.needs_sampling_weights:
            return None
        assert before is not None
        found = [scores.logprobs_sampled for scores in before]
        stale = [index for index, gap in enumerate(gaps) if gap > 0]
        scored = by_sampling_weights(
            [samples[index] for index in stale],
            [gaps[index] for index in stale],
            self.policy,
            self.older,
            lambda scores: (scores.logprobs_sampled,),
            max_tokens=self.config.micro_batch_tokens,
            device=self.policy.device,
        )
        for index, (logprobs,) in zip(stale, scored, strict=True):
            found[index] = logprobs
        return found

    def _start_kls(
        self,
        batches: Sequence[MicroBatch],
        before: Sequence[TurnScores] | None,
        reference: Sequence[Tensor | None],
    ) -> list[float] | None:
        if not self.config.objective.charges_kl:
            return None
        assert before is not None
        found: dict[int, float] = {}
        for batch, start_BT in zip(batches, reference, strict=True):
            assert start_BT is not None
            for turn, start in batch.gather(start_BT).items():
                apart = before[turn].logprobs - start
                # A token without a log-prob is dropped by the guards of the step.
                found[turn] = float(apart[torch.isfinite(apart)].sum())
        return [found[turn] for turn in range(len(found))]

    def _remember_supports(
        self, batches: Sequence[MicroBatch], views: Sequence[TurnView]
    ) -> list[TurnView]:
        """The student before the first of several steps, on supports that came from the teacher."""
        scores = score_batches(
            self.policy, batches, support_ids=[support_of(view).ids for view in views]
        )
        return remember_supports(views, scores)

    @torch.no_grad()
    def _reference_logprobs(self, batch: MicroBatch) -> Tensor | None:
        if self.reference is None:
            return None
        return self.reference.token_logprobs(batch.ids_BT, batch.mask_BT).logprobs_BT


def support_of(view: TurnView) -> TurnSupport:
    """The support of a view whose objective has one."""
    assert view.support is not None
    return view.support


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
