"""One batch of samples -> one update of the policy, with everything there is to report about it.

    merge -> micro-batches -> view of every turn -> log-probs -> objective -> gradients -> AdamW

It knows no store, no engines and no files. A batch is used whole or not at all: it is skipped where
its advantages are noise or its gradient is not finite.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
import torch

from records.lessons.names import LessonKind
from records.names import DropReason
from records.types import ReadySample
from rollout_bridge.merging import PackedSequence
from trainer.batch.collate import TurnScores, split_turns
from trainer.batch.side_sampling import Older, is_known, lacks_side_samples, with_side_samples
from trainer.batch.token_batch import BatchTotals, Correction, assemble
from trainer.batch.views import TeachingPlan, unteachable
from trainer.config import TrainerConfig
from trainer.errors import DistillationOffError, NonFiniteError
from trainer.model.policy import Policy
from trainer.model.teacher_models import EmaTeacher
from trainer.model.token_states import LogprobModel
from trainer.objectives.frame import LossSettings, ObjectiveResult, objective_loss
from trainer.step.memory_plan import is_beyond
from trainer.step.preparation import BatchPreparation, PreparedBatch
from trainer.step.report import UpdateReport, batch_metrics, check_keys, expected_keys


class Updater:
    """Owns the optimiser of `policy`.

    `reference` is the frozen start, needed where `config.needs_start`; `teacher` the model that
    teaches inside the trainer, None where engines' scores do; an averaged one follows every
    successful step.
    """

    def __init__(
        self,
        policy: Policy,
        reference: LogprobModel | None,
        config: TrainerConfig,
        *,
        teacher: LogprobModel | None = None,
        noise: float = 0.0,
        longest: int | None = None,
        older: Older | None = None,
    ):
        self.policy = policy
        self.older = older
        """The policy at kept versions; None: not needed."""
        self.reference = reference
        self.teacher = teacher
        self.config = config
        self.options = config.objective
        self.settings = loss_settings(config)
        self.loss_function = objective_loss
        self.noise = noise
        """Mean |log-prob difference| between engines and trainer at equal weights."""
        self.longest = longest
        """Most tokens of a sequence that fit in memory (`trainer.memory_gb`); None: not known."""
        self.plan = TeachingPlan(
            options=config.objective,
            model=teacher,
            vocab_size=policy.vocab_size,
            max_tokens=config.micro_batch_tokens,
            device=policy.device,
            side_source=config.side_source,
        )
        self._correction = Correction(config.correction.settings())
        self.preparation = self._preparation_by(self.plan)
        """What prepares this updater's batches."""
        self.expected_keys = expected_keys(config, self._correction)
        """Metrics that every update reports."""
        self._parameters = policy.trainable_parameters()
        self.optimizer = new_optimizer(self._parameters, config)
        self._probed = False

    def _preparation_by(self, plan: TeachingPlan) -> BatchPreparation:
        return BatchPreparation(
            policy=self.policy,
            reference=self.reference,
            config=self.config,
            plan=plan,
            correction=self._correction,
            older=self.older,
        )

    def unusable(self, sample: ReadySample) -> DropReason | None:
        """Why a sample cannot train: ids of another vocabulary, too long for the memory, weights
        that are gone, or scores that are missing or not finite.
        """
        if not sample.fits_vocabulary(self.policy.vocab_size):
            return DropReason.FOREIGN_TOKENS
        if is_beyond(sample, self.longest):
            return DropReason.BEYOND_TRAINER_MEMORY
        if not np.isfinite(sample.rollout_logprobs).all():
            return DropReason.ROLLOUT_LOGPROBS_INVALID
        asks = self.options.needs_sampling_weights or lacks_side_samples(sample, self.plan)
        if asks and self.older is not None and not is_known(sample, self.older):
            return DropReason.SAMPLING_WEIGHTS_GONE
        return unteachable(sample, self.plan)

    def draw_side_samples(
        self, samples: Sequence[ReadySample], version_gaps: Sequence[int] | None = None
    ) -> list[ReadySample]:
        """Those of `samples` that lacked side samples which the objective needs, now with them;
        `version_gaps` (steps since each was sampled) default to 0.
        """
        lacking = [i for i, sample in enumerate(samples) if lacks_side_samples(sample, self.plan)]
        gaps = [0] * len(samples) if version_gaps is None else version_gaps
        return (
            with_side_samples(
                [samples[index] for index in lacking],
                self.policy,
                self.plan,
                [gaps[index] for index in lacking],
                self.older,
            )
            if lacking
            else []
        )

    def update(
        self,
        samples: Sequence[ReadySample],
        step: int,
        *,
        version_gaps: Sequence[int] | None = None,
        sequences: Sequence[PackedSequence] | None = None,
        rate: float = 1.0,
    ) -> UpdateReport:
        """Train on `samples` as step number `step` (from 0; it sets the learning rate, which is
        multiplied by `rate`).

        `version_gaps` (steps since each was sampled) default to 0, `sequences` to
        `merge_turns(samples)`. Raises NonFiniteError for too many non-finite log-probs,
        or for a teacher that scores nothing, DistillationOffError where the distillation term is
        silently absent.
        """
        started = time.perf_counter()
        lr = self._set_learning_rate(rate * learning_rate_at(step, self.config))
        prepared = self.preparation.prepare(samples, version_gaps, sequences, step)
        if prepared.lost:
            return self._update_without(prepared.lost, samples, step, version_gaps, rate)
        looked = time.perf_counter()
        skipped, changed, grad_norm = None, False, 0.0
        found: dict[int, TurnScores] | None = {} if self.config.epochs_per_batch > 1 else None
        for _ in range(self.config.epochs_per_batch):
            total = self.accumulate(prepared, found)
            skipped, grad_norm = self._check_and_step(total, samples)
            if skipped is not None:
                break
            changed = True
            if found is not None:
                prepared, found = prepared.repeated(found), None
        self.optimizer.zero_grad(set_to_none=True)
        metrics = total.statistics() | self._correction.report(total.rows).metrics
        # The correction counts non-finite tokens too, but only among those that it compares.
        metrics |= batch_metrics(total, samples, prepared, self.plan, self.config)
        metrics |= {
            "lr": lr,
            "grad_norm": grad_norm,
            "seconds/prepare": looked - started,
            "seconds/compute": time.perf_counter() - looked,
        }
        check_keys(metrics, self.expected_keys)
        return UpdateReport(
            skipped=None if changed else skipped,
            metrics=metrics,
            advantages=[total.advantages[index] for index in range(len(samples))],
            figures=[total.figures[index] for index in range(len(samples))],
            untrained=dict.fromkeys(total.rejected_turns, DropReason.ROLLOUT_REJECTED),
        )

    def _update_without(
        self,
        lost: frozenset[int],
        samples: Sequence[ReadySample],
        step: int,
        version_gaps: Sequence[int] | None,
        rate: float,
    ) -> UpdateReport:
        """The step on all samples but those that the teacher here could not score; a sample is
        dropped as a whole (ALGORITHMS 0.1).
        """
        kept = [index for index in range(len(samples)) if index not in lost]
        if not kept and len(lost) > 1:
            raise NonFiniteError(
                f"the teacher in the trainer has no finite score for any of {len(lost)} turns: its "
                "weights are not finite, or its logits overflow in trainer.dtype"
            )
        if kept:
            gaps = None if version_gaps is None else [version_gaps[index] for index in kept]
            taken = [samples[index] for index in kept]
            report = self.update(taken, step, version_gaps=gaps, rate=rate)
        else:
            skipped = DropReason.TEACHER_LOGPROBS_INVALID
            report = UpdateReport(skipped=skipped, metrics={}, advantages=[], figures=[])
        return report.among(kept, samples)

    def rehearse(
        self, samples: Sequence[ReadySample], plan: TeachingPlan | None = None
    ) -> BatchTotals:
        """The whole path of an update without the step, under another `plan` if one is given. It
        leaves no gradient behind, nor what it found about the distillation term's.
        """
        preparation = self.preparation if plan is None else self._preparation_by(plan)
        try:
            return self.accumulate(preparation.prepare(samples))
        finally:
            self._probed = False
            self.optimizer.zero_grad(set_to_none=True)

    def accumulate(
        self, prepared: PreparedBatch, found: dict[int, TurnScores] | None = None
    ) -> BatchTotals:
        """Gradients of the whole batch, one micro-batch at a time. `found` is given the policy's
        detached scores of each turn, if they are wanted.
        """
        self.optimizer.zero_grad(set_to_none=True)
        total = BatchTotals(unnormalised=prepared.statistics.unnormalised)
        parts = zip(prepared.batches, prepared.requests, prepared.reference, strict=True)
        for batch, request, reference_BT in parts:
            now = self.policy.token_logprobs(
                batch.ids_BT, batch.mask_BT, batch.temperatures_BT, request
            )
            if found is not None:
                found |= split_turns(now, batch)
            assembled = assemble(batch, now, reference_BT, prepared)
            result = self.loss_function(
                assembled.tokens, self.options, self.settings, prepared.counts
            )
            if not self._probed:
                self._probe(result)
            result.loss.backward()
            total.add(result, assembled, batch, prepared.views)
        factor = total.renormalise(prepared.counts, self.config.aggregation)
        for parameter in self._parameters:
            if parameter.grad is not None and factor != 1.0:
                parameter.grad.mul_(factor)
        return total

    def _probe(self, result: ObjectiveResult) -> None:
        """Whether the distillation term alone has a gradient (checked once)."""
        gradients = torch.autograd.grad(
            result.distillation_loss, self._parameters, retain_graph=True, allow_unused=True
        )
        self._probed = any(
            bool(gradient.abs().max() > 0) for gradient in gradients if gradient is not None
        )

    def _check_and_step(
        self, total: BatchTotals, samples: Sequence[ReadySample]
    ) -> tuple[DropReason | None, float]:
        """Guards, clipping, AdamW. Returns (why there was no step, gradient norm)."""
        tokens, nonfinite = total.sums["tokens"], total.sums["nonfinite"]
        if nonfinite > self.config.max_nonfinite_frac * (tokens + nonfinite):
            raise NonFiniteError(
                f"{nonfinite:.0f} of {tokens + nonfinite:.0f} tokens have a non-finite log-prob in "
                f"the trainer; max_nonfinite_frac is {self.config.max_nonfinite_frac}"
            )
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self.config.grad_clip))
        if tokens == 0:
            # Every token was dropped: momentum alone would still move the weights.
            reason = DropReason.NONFINITE_GRADIENT if nonfinite else DropReason.ROLLOUT_REJECTED
            return reason, norm
        # Not only below: without measured noise, gaps of exactly 0 teach nothing either.
        has_gap = teaches(samples, total, self.config.noise_floor_factor * self.noise)
        if not has_gap and total.sums["reward_abs"] == 0:
            return DropReason.BELOW_NOISE, norm
        if not math.isfinite(norm):
            return DropReason.NONFINITE_GRADIENT, norm
        if has_gap and not self._probed:
            raise DistillationOffError(
                "the distillation term has no gradient, yet its advantages are not noise: "
                "no step can teach anything"
            )
        self.optimizer.step()
        if isinstance(self.teacher, EmaTeacher):
            self.teacher.follow()
        return None, norm

    def _set_learning_rate(self, lr: float) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr


def new_optimizer(
    parameters: Sequence[torch.nn.Parameter], config: TrainerConfig
) -> torch.optim.AdamW:
    """AdamW at the peak rate."""
    return torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=config.adam_betas,
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def loss_settings(config: TrainerConfig) -> LossSettings:
    """What surrounds the objective, from the trainer's configuration."""
    return LossSettings(
        aggregation=config.aggregation,
        beta_kl=config.beta_kl,
        kl_type=config.kl_type,
        kl_ratio=config.kl_ratio,
        beta_entropy=config.beta_entropy,
        horizon=config.aggregation_horizon,
    )


def learning_rate_at(step: int, config: TrainerConfig) -> float:
    """The rate of step `step` (0 is the first): up linearly over the warm-up, then by its style.

    linear and cosine fall from the peak to 0 at `max_steps`, like Megatron's styles of these names
    with that many decay iterations.
    """
    warmup, peak = config.warmup_steps, config.learning_rate
    if step < warmup:
        return peak * (step + 1) / warmup
    if config.lr_decay_style == "constant":
        return peak
    assert config.max_steps is not None
    done = min(1.0, (step - warmup) / (config.max_steps - warmup))
    if config.lr_decay_style == "linear":
        return peak * (1 - done)
    return peak * 0.5 * (1 + math.cos(math.pi * done))


def _hinted_places(samples: Sequence[ReadySample]) -> list[int]:
    """Places of the samples whose teacher reads a hint. Counter- and keep-lessons hold the policy
    to the start: their small gaps do not mean that a batch teaches nothing.
    """
    return [place for place, one in enumerate(samples) if one.lesson in (None, LessonKind.HINT)]


def teaches(samples: Sequence[ReadySample], totals: BatchTotals, floor: float) -> bool:
    """Whether the mean |teacher - student| of a batch's hinted samples is more than `floor`, the
    noise in nats. A batch without any undoes what ended hints taught or wins open wishes back: a
    measurement decides when that is enough, so its mean need not be above the noise, only above 0.
    """
    hinted = _hinted_places(samples)
    if hinted:
        return totals.mean_gap_of(hinted) > floor
    return totals.mean_gap_of(range(len(samples))) > 0.0
