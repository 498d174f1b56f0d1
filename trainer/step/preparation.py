"""A batch before its first gradient: micro-batches, and the scores of teacher, reference and
student.

The student is the one before the step. It takes no step, and everything it gives is detached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from records.types import ReadySample
from rollout_bridge.merging import PackedSequence, merge_turns
from trainer.batch.collate import MicroBatch, build_micro_batch, comparable, plan_micro_batches
from trainer.batch.correction import Correction
from trainer.batch.sampling_scores import Older, by_sampling_weights
from trainer.batch.teach import TeachingPlan, TurnSupport
from trainer.batch.turn_scores import TurnScores, score_batches
from trainer.batch.views import TurnView, remember_supports, view_turns
from trainer.config import TrainerConfig
from trainer.model.policy import Policy
from trainer.model.token_states import LogprobModel


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
        # Layers that are computed again keep only inputs, and each row's keys are as large; what
        # was measured for `memory_gb` is a row that shares nothing.
        groups = plan_micro_batches(
            packed,
            self.config.micro_batch_tokens,
            shares=shares and not self.policy.recomputes and self.config.memory_gb is None,
        )
        temperatures = [sample.temperature if comparable(sample) else 1.0 for sample in samples]
        batches = [
            build_micro_batch(group, self.policy.device, temperatures, shares=shares)
            for group in groups
        ]
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
