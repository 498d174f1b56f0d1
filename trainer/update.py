"""One batch of samples -> one update of the policy, with everything there is to report about it.

    merge -> micro-batches -> log-probs -> objective -> gradients -> checks -> AdamW

It knows no store, no engines and no files. A batch is used whole or not at all: it is skipped where
its advantages are noise or its gradient is not finite.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from records.types import DropReason, Logprobs, ReadySample
from trainer.collate import (
    MicroBatch,
    PackedSequence,
    build_micro_batch,
    comparable,
    merge_turns,
    plan_micro_batches,
)
from trainer.config import TrainerConfig
from trainer.errors import DistillationOffError, NonFiniteError
from trainer.objectives.opd import ObjectiveResult, OpdSettings, TokenBatch
from trainer.objectives.registry import Objective
from trainer.policy import Policy
from trainer.token_states import LogprobModel, TokenLogprobs, TokenRequest

STATISTIC_KEYS = frozenset(
    {
        "opd/adv_mean",
        "opd/adv_std",
        "opd/adv_abs_max",
        "opd/adv_pos_frac",
        "teacher_student_absdiff",
        "ratio_max",
        "opd/num_eligible_samples",
        "opd/frac_tokens_with_kd",
        "guard/nonfinite_tokens",
        "guard/empty_batch",
        "guard/modified_turns",
        "grad_norm",
        "lr",
        "turns",
        "tokens",
        "sequences",
        "tokens_computed",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """`skipped` is None if the weights changed. `advantages` has [R] values per sample, in order,
    NaN for a token that was dropped.
    """

    skipped: DropReason | None
    metrics: dict[str, float]
    advantages: list[Logprobs]


@dataclass(slots=True, kw_only=True)
class _Pass:
    """Sums over the micro-batches of one pass over the batch."""

    reduced: dict[str, float] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    num_turns: int = 0
    advantages: dict[int, Logprobs] = field(default_factory=dict)

    def add(self, result: ObjectiveResult, sequences: Sequence[PackedSequence]) -> None:
        for name, value in result.reduced.items():
            self.reduced[name] = self.reduced.get(name, 0.0) + value.item()
        for name, value in result.token_sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value.item()
        for name, value in result.token_max.items():
            self.maxima[name] = max(self.maxima.get(name, 0.0), value.item())
        self.num_turns += result.num_turns
        nan = torch.full_like(result.advantages_BT, float("nan"))
        advantages = torch.where(result.mask_BT > 0, result.advantages_BT, nan).cpu().numpy()
        for row, sequence in enumerate(sequences):
            for span in sequence.spans:
                self.advantages[span.turn] = advantages[row, span.start : span.end].copy()


class Updater:
    """Owns the optimiser of `policy`; `reference` is the frozen start, needed if beta_kl > 0."""

    def __init__(
        self,
        policy: Policy,
        reference: LogprobModel | None,
        objective: Objective,
        config: TrainerConfig,
        *,
        noise: float = 0.0,
    ):
        self.policy = policy
        self.reference = reference
        self.objective = objective
        self.config = config
        self.settings = opd_settings(config)
        self.noise = noise
        """Mean |log-prob difference| between engines and trainer at equal weights."""
        self._parameters = policy.trainable_parameters()
        self.optimizer = torch.optim.AdamW(
            self._parameters,
            lr=config.learning_rate,
            betas=config.adam_betas,
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._probed = False

    @property
    def expected_keys(self) -> frozenset[str]:
        """Metrics that every update reports; one that is missing stops training."""
        return self.objective.reduced_keys(self.settings) | STATISTIC_KEYS

    def update(
        self,
        samples: Sequence[ReadySample],
        step: int,
        sequences: Sequence[PackedSequence] | None = None,
    ) -> UpdateReport:
        """Train on `samples` as step number `step` (from 0; it sets the learning rate).

        `sequences` default to `merge_turns(samples)`. Raises NonFiniteError for too many non-finite
        log-probs, DistillationOffError where the distillation term is silently absent.
        """
        started = time.perf_counter()
        packed = merge_turns(samples) if sequences is None else sequences
        groups = plan_micro_batches(packed, self.config.micro_batch_tokens)
        device = str(self.policy.device)
        batches = [build_micro_batch(group, samples, device) for group in groups]
        collated = time.perf_counter()
        lr = self._set_learning_rate(step)
        epochs = self.config.epochs_per_batch
        old = None if epochs == 1 else [self._old_logprobs(batch) for batch in batches]
        reference = [self._reference_logprobs(batch) for batch in batches]
        skipped, changed, grad_norm = None, False, 0.0
        for _ in range(epochs):
            total = self._accumulate(batches, old, reference, num_turns=len(samples))
            skipped, grad_norm = self._check_and_step(total)
            if skipped is not None:
                break
            changed = True
        self.optimizer.zero_grad(set_to_none=True)
        metrics = self._metrics(total, samples, batches)
        metrics |= {
            "lr": lr,
            "grad_norm": grad_norm,
            "seconds/collate": collated - started,
            "seconds/compute": time.perf_counter() - collated,
        }
        self._assert_keys(metrics)
        return UpdateReport(
            skipped=None if changed else skipped,
            metrics=metrics,
            advantages=[total.advantages[index] for index in range(len(samples))],
        )

    def _accumulate(
        self,
        batches: Sequence[MicroBatch],
        old: list[TokenLogprobs] | None,
        reference: Sequence[Tensor | None],
        num_turns: int,
    ) -> _Pass:
        """Gradients of the whole batch, one micro-batch at a time."""
        self.optimizer.zero_grad(set_to_none=True)
        total = _Pass()
        for index, batch in enumerate(batches):
            now = self.policy.token_logprobs(
                batch.ids_BT,
                batch.mask_BT,
                batch.temperatures_BT,
                TokenRequest(entropy_gradient=self.config.beta_entropy != 0),
            )
            tokens = _token_batch(batch, now, None if old is None else old[index], reference[index])
            result = self.objective.loss(tokens, self.settings, num_turns)
            if not self._probed:
                self._probe(result)
            result.loss.backward()
            total.add(result, batch.sequences)
        self._renormalise(total, num_turns)
        return total

    def _probe(self, result: ObjectiveResult) -> None:
        """Whether the distillation term alone has a gradient (checked once)."""
        gradients = torch.autograd.grad(
            result.pg_loss, self._parameters, retain_graph=True, allow_unused=True
        )
        self._probed = any(
            bool(gradient.abs().max() > 0) for gradient in gradients if gradient is not None
        )

    def _renormalise(self, total: _Pass, planned_turns: int) -> None:
        """Turns that lost all their tokens to guards leave the denominator as well."""
        if total.num_turns in (0, planned_turns):
            return
        factor = planned_turns / total.num_turns
        total.reduced = {name: value * factor for name, value in total.reduced.items()}
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def _check_and_step(self, total: _Pass) -> tuple[DropReason | None, float]:
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
            return DropReason.NONFINITE_GRADIENT, norm
        floor = self.config.noise_floor_factor * self.noise
        # Not only below: without measured noise, advantages of exactly 0 teach nothing either.
        if total.sums["adv_abs"] / tokens <= floor:
            return DropReason.BELOW_NOISE, norm
        if not math.isfinite(norm):
            return DropReason.NONFINITE_GRADIENT, norm
        if not self._probed:
            raise DistillationOffError(
                "the distillation term has no gradient, yet its advantages are not noise: "
                "no step can teach anything"
            )
        self.optimizer.step()
        return None, norm

    @torch.no_grad()
    def _old_logprobs(self, batch: MicroBatch) -> TokenLogprobs:
        return self.policy.token_logprobs(batch.ids_BT, batch.mask_BT, batch.temperatures_BT)

    @torch.no_grad()
    def _reference_logprobs(self, batch: MicroBatch) -> Tensor | None:
        if self.reference is None:
            return None
        return self.reference.token_logprobs(batch.ids_BT, batch.mask_BT).logprobs_BT

    def _set_learning_rate(self, step: int) -> float:
        warmup = self.config.warmup_steps
        lr = self.config.learning_rate * min(1.0, (step + 1) / warmup if warmup else 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _metrics(
        self, total: _Pass, samples: Sequence[ReadySample], batches: Sequence[MicroBatch]
    ) -> dict[str, float]:
        tokens = total.sums["tokens"]
        with_teacher = sum(
            int(torch.isfinite(batch.teacher_logprobs_BT[batch.mask_BT > 0]).sum())
            for batch in batches
        )
        count = max(tokens, 1.0)
        mean = total.sums["adv"] / count
        variance = max(total.sums["adv_squared"] / count - mean * mean, 0.0)
        return _mean_over_comparable(total.reduced) | {
            "opd/adv_mean": mean,
            "opd/adv_std": math.sqrt(variance),
            "opd/adv_abs_max": total.maxima["adv_abs_max"],
            "opd/adv_pos_frac": total.sums["adv_positive"] / count,
            "teacher_student_absdiff": total.sums["adv_abs"] / count,
            "ratio_max": total.maxima["ratio_max"],
            "opd/num_eligible_samples": float(total.num_turns),
            "opd/frac_tokens_with_kd": with_teacher / max(tokens + total.sums["nonfinite"], 1.0),
            "guard/nonfinite_tokens": total.sums["nonfinite"],
            "guard/empty_batch": float(tokens == 0),
            "guard/modified_turns": float(sum(not comparable(sample) for sample in samples)),
            "turns": float(len(samples)),
            "tokens": tokens,
            "sequences": float(sum(len(batch.sequences) for batch in batches)),
            "tokens_computed": float(sum(batch.num_tokens for batch in batches)),
        }

    def _assert_keys(self, metrics: dict[str, float]) -> None:
        missing = self.expected_keys - metrics.keys()
        if missing:
            raise DistillationOffError(f"the update did not report {sorted(missing)}")
        if metrics["opd/num_eligible_samples"] > 0 and metrics["opd/frac_tokens_with_kd"] == 0:
            raise DistillationOffError("samples are eligible, but no token has a teacher's score")


def opd_settings(config: TrainerConfig) -> OpdSettings:
    """The objective's coefficients, out of the trainer's configuration."""
    return OpdSettings(
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
        tis_cap=config.tis_cap or None,
        beta_kl=config.beta_kl,
        kl_type=config.kl_type,
        beta_entropy=config.beta_entropy,
        advantage_reference=config.advantage_reference,
    )


def _mean_over_comparable(reduced: dict[str, float]) -> dict[str, float]:
    """The gap between trainer and rollout engine where there is one to measure; NaN without any."""
    name = "train_rollout_logprob_abs_diff"
    share = reduced.get("rollout_comparable_frac", 0.0)
    if name not in reduced:
        return reduced
    return reduced | {name: reduced[name] / share if share > 0 else math.nan}


def _token_batch(
    batch: MicroBatch, now: TokenLogprobs, old: TokenLogprobs | None, reference: Tensor | None
) -> TokenBatch:
    """With one step per batch the old log-probs are the current ones, detached: ratio 1."""
    same = now.logprobs_sampled_BT is now.logprobs_BT
    if old is None:
        old_BT = now.logprobs_BT.detach()
        old_sampled_BT = old_BT if same else now.logprobs_sampled_BT.detach()
    else:
        old_BT, old_sampled_BT = old.logprobs_BT, old.logprobs_sampled_BT
    return TokenBatch(
        logprobs_BT=now.logprobs_BT,
        logprobs_sampled_BT=now.logprobs_sampled_BT,
        old_logprobs_BT=old_BT,
        old_logprobs_sampled_BT=old_sampled_BT,
        reference_logprobs_BT=reference,
        teacher_logprobs_BT=batch.teacher_logprobs_BT,
        rollout_logprobs_BT=batch.rollout_logprobs_BT,
        entropy_BT=now.entropy_BT,
        mask_BT=batch.mask_BT,
        turn_ids_BT=batch.turn_ids_BT,
    )


def finite_sample(sample: ReadySample) -> DropReason | None:
    """Why a sample cannot train, if a log-prob that somebody else computed is not finite."""
    if not np.isfinite(sample.teacher_logprobs).all():
        return DropReason.TEACHER_LOGPROBS_INVALID
    if not np.isfinite(sample.rollout_logprobs).all():
        return DropReason.ROLLOUT_LOGPROBS_INVALID
    return None
