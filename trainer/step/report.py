"""What an update, and the attempt that it is part of, report to the store, the metrics and the
caller, and what an update must not leave out.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from records.names import DropReason
from records.reading.summary import VoteSummary
from records.training.step_results import SampleResult, TokenFigures
from records.turns.recording import RecordingKind
from records.types import Logprobs, ReadySample
from rollout_bridge.rehearsal.kinds import LIVE, counts_by_kind
from rollout_bridge.scoring.scoring_metrics import drop_metric
from trainer.batch.collate import comparable
from trainer.batch.token_batch import BatchTotals, Correction
from trainer.batch.token_figures import QUANTILE_KEYS
from trainer.batch.views import TeachingPlan, TurnView, has_teacher
from trainer.checkpoints.manifest import Manifest
from trainer.config import TrainerConfig
from trainer.config_checks import leaves_stale_uncorrected
from trainer.errors import DistillationOffError
from trainer.objectives.frame import expected_means
from trainer.objectives.options import HindsightOpd, ObjectiveOptions
from trainer.objectives.policy.policy_gradient import term_ratio
from trainer.objectives.rollout_correction.settings import health_warnings
from trainer.step.preparation import PreparedBatch

STATISTIC_KEYS = frozenset(
    {
        *QUANTILE_KEYS,
        "opd/adv_mean",
        "opd/adv_std",
        "opd/adv_abs_max",
        "opd/adv_pos_frac",
        "teacher_student_absdiff",
        "ratio_max",
        "opd/frac_opd_samples",
        "opd/num_eligible_samples",
        "opd/kd_coef",
        "opd/frac_tokens_with_kd",
        "guard/nonfinite_tokens",
        "guard/empty_batch",
        "guard/teacher_invalid_turns",
        "guard/modified_turns",
        "guard/rejected_tokens",
        "grad_norm",
        "lr",
        "turns",
        "tokens",
        "sequences",
        "tokens_computed",
    }
)


def term_ratios(
    reduced: Mapping[str, float], options: ObjectiveOptions, beta_kl: float
) -> dict[str, float]:
    """The size of the terms added to a policy gradient, relative to it; above 1 a term dominates
    (ALGORITHMS 7.4). `reduced` are the means of a whole batch.
    """
    if beta_kl > 0 and {"kl_loss", "pg_loss"} <= reduced.keys():
        return {"kl_to_pg_ratio": term_ratio(reduced["kl_loss"], beta_kl, reduced["pg_loss"])}
    if "reward_pg_loss" in reduced:
        rewards = options.reward_coef * reduced["reward_pg_loss"]
        return {"opd_to_pg_ratio": term_ratio(reduced["opd/kl_loss"], 1.0, rewards)}
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """`skipped` is None if the weights changed. `advantages` has [R] values per sample, in order,
    NaN for a token that did not train; `figures` what the last pass computed at each token, None
    for a sample that was in no pass. `untrained` gives, by index, why a sample has no such token,
    unless the reason is a log-prob of the trainer's.
    """

    skipped: DropReason | None
    metrics: dict[str, float]
    advantages: list[Logprobs]
    figures: list[TokenFigures | None]
    untrained: Mapping[int, DropReason] = field(default_factory=dict)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Those of rollout correction."""
        return health_warnings(self.metrics)

    def among(self, kept: Sequence[int], samples: Sequence[ReadySample]) -> UpdateReport:
        """This report of the `kept` ones as one of all `samples`: the others' teacher failed."""
        advantages = [np.full(len(one.response_ids), np.nan, np.float32) for one in samples]
        figures: list[TokenFigures | None] = [None] * len(samples)
        for index, own, seen in zip(kept, self.advantages, self.figures, strict=True):
            advantages[index], figures[index] = own, seen
        lost = set(range(len(samples))) - set(kept)
        failed = dict.fromkeys(lost, DropReason.TEACHER_LOGPROBS_INVALID)
        return replace(
            self,
            metrics=self.metrics | {"guard/teacher_invalid_turns": float(len(lost))},
            advantages=advantages,
            figures=figures,
            untrained=failed | {kept[index]: why for index, why in self.untrained.items()},
        )


HINT_DROPS = (
    DropReason.NO_HINT,
    DropReason.NO_QUORUM,
    DropReason.HINT_REJECTED,
    DropReason.JUDGE_UNAVAILABLE,
    DropReason.JUDGE_PROMPT_TOO_LONG,
    DropReason.OVER_CAPACITY,
    DropReason.HINT_ONLY,
    DropReason.REVIEW_REJECTED,
    DropReason.NO_USER_MESSAGE,
    DropReason.HINT_AGREES,
    DropReason.HINT_ENDED,
    DropReason.HINT_UNGUARDED,
    DropReason.HINTED_PROMPT_MISMATCH,
    DropReason.HINTED_PROMPT_TOO_LONG,
    DropReason.TEACHER_MISALIGNED,
    DropReason.TEACHER_LOGPROBS_INVALID,
    DropReason.TEACHER_UNAVAILABLE,
    DropReason.INTERNAL_ERROR,
)
"""Why a turn with a next state got no hint, or its hint no score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One update attempt: the version it made, or why it made none; metrics as logged."""

    version: int | None
    skipped: DropReason | None
    metrics: dict[str, Any]


def trained_results(
    samples: Sequence[ReadySample], staleness: Sequence[int], report: UpdateReport
) -> list[SampleResult]:
    """What training did with each sample (turn or lesson) that has a token left after the
    guards.
    """
    return [
        _result(sample, age, advantages, figures)
        for sample, age, advantages, figures in zip(
            samples, staleness, report.advantages, report.figures, strict=True
        )
        if np.isfinite(advantages).any()
    ]


def step_metrics(
    report: UpdateReport,
    *,
    manifest: Manifest,
    staleness: Sequence[int],
    seconds: dict[str, float],
) -> dict[str, Any]:
    """One record of the metrics log; `manifest` is the newest step, `staleness` is in versions."""
    return {
        "time": time.time(),
        "step": manifest.step,
        "version": manifest.version,
        "skipped": report.skipped.value if report.skipped else None,
        "staleness_min": min(staleness),
        "staleness_mean": sum(staleness) / len(staleness),
        "staleness_max": max(staleness),
        "staleness_std": statistics.pstdev(staleness),
        **report.metrics,
        **seconds,
    }


def batch_counters(samples: Sequence[ReadySample], chain: Sequence[int]) -> dict[str, float]:
    """How many turns of a batch came from each source, how many lessons there are of each kind and
    of each hint, and how many samples, lessons included, have tokens of a version that is not in
    the `chain` of surviving ones.
    """
    alive = set(chain)
    lost = [one for one in samples if not alive.issuperset(s.version for s in one.version_spans)]
    turns = [one for one in samples if one.lesson is None]
    kinds = Counter(one.recording_kind for one in turns)
    return {
        "turns/live": kinds[None],
        "turns/recorded": len(turns) - kinds[None] - kinds[RecordingKind.RESAMPLED],
        "turns/resampled": kinds[RecordingKind.RESAMPLED],
        "turns/again": sum(one.times_trained > 0 for one in turns),
        "guard/abandoned_turns": len(lost),
        **counts_by_kind(samples),
    }


def stale_uncorrected(staleness: Sequence[int], config: TrainerConfig) -> dict[str, int]:
    """How many turns of a batch are older than the policy with nothing that corrects for it
    (ALGORITHMS 9 item 2).
    """
    counts = leaves_stale_uncorrected(config)
    return {"guard/stale_uncorrected_turns": sum(age > 0 for age in staleness) if counts else 0}


def hint_metrics(
    votes: VoteSummary,
    drops: Mapping[DropReason, int],
    teacher_latency_s: float | None,
    judged_share: float | None,
) -> dict[str, float]:
    """The judge's and the teacher's part of the metrics (ALGORITHMS 1.8), over the run so far.

    Rates and means of nothing are left out; a count of nothing is 0.
    """
    figures: dict[str, float | None] = {
        "hint/vote_none": votes.votes_none,
        "hint/vote_pos": votes.votes_pos,
        "hint/vote_neg": votes.votes_neg,
        "hint/accept_rate": votes.accept_rate,
        "hint/len_chars": votes.mean_hint_chars,
    }
    figures["teacher/latency"] = teacher_latency_s
    figures["judge/sampled_share"] = judged_share
    figures |= {drop_metric(reason): drops.get(reason, 0) for reason in HINT_DROPS}
    return {name: value for name, value in figures.items() if value is not None}


def _result(
    sample: ReadySample, staleness: int, advantages: Logprobs, figures: TokenFigures | None
) -> SampleResult:
    """Mean and maximum over the tokens that trained."""
    finite = advantages[np.isfinite(advantages)]
    return SampleResult(
        turn_id=sample.turn_id,
        staleness=staleness,
        advantage_mean=float(finite.mean()),
        advantage_abs_max=float(np.abs(finite).max()),
        advantages=advantages,
        figures=figures,
    )


def expected_keys(config: TrainerConfig, correction: Correction) -> frozenset[str]:
    """Metrics that every update reports; one that is missing stops training."""
    return (
        expected_means(config.objective)
        | correction.expected_keys
        | STATISTIC_KEYS
        | {"loss", "opd/kl_loss", "entropy_loss", "rollout_comparable_frac"}
        | {"tis", "tis_abs", "tis_clipfrac"}
        | ({"kl_loss", "kl/clamped_frac"} if config.beta_kl > 0 else set())
    )


def batch_metrics(
    total: BatchTotals,
    samples: Sequence[ReadySample],
    prepared: PreparedBatch,
    plan: TeachingPlan,
    config: TrainerConfig,
) -> dict[str, float]:
    """What a pass over `samples` was made of, next to its statistics."""
    tokens, nonfinite = total.sums["tokens"], total.sums["nonfinite"]
    options = config.objective
    facts = term_ratios(total.reduced, options, config.beta_kl)
    if isinstance(options, HindsightOpd) and options.normalise:
        facts["opd/unnormalised_tokens"] = total.unnormalised
    return (
        facts
        | teaching_metrics(samples, prepared.views, plan)
        | lesson_gaps(samples, total)
        | prepared.reward_metrics
        | {
            "opd/num_eligible_samples": float(total.num_taught_turns),
            "opd/kd_coef": plan.kd_coef,
            "opd/frac_tokens_with_kd": total.sums["tokens_with_teacher"] / max(tokens, 1.0),
            "guard/nonfinite_tokens": nonfinite,
            "guard/rejected_tokens": total.rejected_tokens,
            "guard/empty_batch": float(tokens == 0),
            "guard/teacher_invalid_turns": 0.0,
            "guard/modified_turns": float(sum(not comparable(sample) for sample in samples)),
            "turns": float(len(samples)),
            "tokens": tokens,
            "sequences": float(sum(len(batch.sequences) for batch in prepared.batches)),
            "tokens_computed": float(prepared.tokens_computed),
        }
    )


def teaching_metrics(
    samples: Sequence[ReadySample], views: Sequence[TurnView], plan: TeachingPlan
) -> dict[str, float]:
    """The share of samples with a teacher, and what turns that chose among hints chose."""
    taught = sum(has_teacher(sample, plan) for sample in samples)
    return {"opd/frac_opd_samples": taught / len(samples)} | _hint_choice_metrics(views)


def _hint_choice_metrics(views: Sequence[TurnView]) -> dict[str, float]:
    """For turns whose tokens chose among hints: tokens shared with the chosen hint's top-k, and the
    chosen hint's index, as means over tokens (ALGORITHMS 3.5); empty without any.
    """
    choices = [view.choice for view in views if view.choice is not None]
    if not choices:
        return {}
    overlap = torch.cat([one.overlap_T for one in choices]).double()
    candidates = torch.cat([one.candidates_T for one in choices]).double()
    return {
        "opd/sel_overlap_at_k_star": overlap.mean().item(),
        "opd/sel_k_star_mean": candidates.mean().item(),
    }


def check_keys(metrics: dict[str, float], expected: frozenset[str]) -> None:
    """Raise DistillationOffError for an update that does not report one of these."""
    missing = expected - metrics.keys()
    if missing:
        raise DistillationOffError(f"the update did not report {sorted(missing)}")
    has_tokens = metrics["guard/empty_batch"] == 0 and metrics["opd/num_eligible_samples"] > 0
    if has_tokens and metrics["opd/frac_tokens_with_kd"] == 0:
        raise DistillationOffError("samples are eligible, but no token has a teacher's score")


def lesson_gaps(samples: Sequence[ReadySample], totals: BatchTotals) -> dict[str, float]:
    """For a batch with lessons by kind the mean |teacher - student| of the tokens that have a
    teacher, in nats. Empty for a batch without lessons.
    """
    if all(sample.lesson is None for sample in samples):
        return {}
    places: dict[str, list[int]] = {}
    for place, sample in enumerate(samples):
        kind = LIVE if sample.lesson is None else sample.lesson.value
        places.setdefault(kind, []).append(place)
    gaps = {f"lessons/gap_{kind}": totals.mean_gap_of(found) for kind, found in places.items()}
    return {name: gap for name, gap in gaps.items() if not math.isnan(gap)}
