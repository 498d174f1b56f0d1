"""What an update reports, and what it must not leave out."""

from __future__ import annotations

from collections.abc import Sequence

from records.types import ReadySample
from trainer.batch.collate import comparable
from trainer.batch.correction import Correction
from trainer.batch.prompt_groups import reward_facts
from trainer.batch.reward_view import eligibility_metrics, reward_metrics
from trainer.batch.statistics import BatchTotals
from trainer.batch.teach import TeachingPlan, has_teacher
from trainer.batch.views import hint_choice_metrics
from trainer.config import TrainerConfig
from trainer.errors import DistillationOffError
from trainer.objectives.frame import expected_means
from trainer.objectives.options import HindsightOpd
from trainer.step.lessons import lesson_metrics
from trainer.step.preparation import PreparedBatch
from trainer.step.report import STATISTIC_KEYS, term_ratios


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
    """Statistics of a pass over `samples`, and counts of what they were."""
    tokens, nonfinite = total.sums["tokens"], total.sums["nonfinite"]
    batches, options = prepared.batches, config.objective
    taught = sum(has_teacher(sample, plan) for sample in samples)
    compared = reward_facts(samples, prepared.start_kls)
    facts = eligibility_metrics(compared, options) | reward_metrics(compared, options)
    if isinstance(options, HindsightOpd) and options.normalise:
        facts["opd/unnormalised_tokens"] = total.unnormalised
    ratios = term_ratios(total.reduced, options, config.beta_kl)
    return (
        total.statistics()
        | facts
        | ratios
        | hint_choice_metrics(prepared.views)
        | lesson_metrics(samples, total)
        | {
            "opd/frac_opd_samples": taught / len(samples),
            "opd/num_eligible_samples": float(total.num_taught_turns),
            "opd/kd_coef": options.kd_coef,
            "opd/frac_tokens_with_kd": total.sums["tokens_with_teacher"] / max(tokens, 1.0),
            "guard/nonfinite_tokens": nonfinite,
            "guard/rejected_tokens": total.rejected_tokens,
            "guard/empty_batch": float(tokens == 0),
            "guard/teacher_invalid_turns": 0.0,
            "guard/modified_turns": float(sum(not comparable(sample) for sample in samples)),
            "turns": float(len(samples)),
            "tokens": tokens,
            "sequences": float(sum(len(batch.sequences) for batch in batches)),
            "tokens_computed": float(sum(batch.num_tokens for batch in batches)),
        }
    )


def check_keys(metrics: dict[str, float], expected: frozenset[str]) -> None:
    """Raise DistillationOffError for an update that does not report one of these."""
    missing = expected - metrics.keys()
    if missing:
        raise DistillationOffError(f"the update did not report {sorted(missing)}")
    has_tokens = metrics["guard/empty_batch"] == 0 and metrics["opd/num_eligible_samples"] > 0
    if has_tokens and metrics["opd/frac_tokens_with_kd"] == 0:
        raise DistillationOffError("samples are eligible, but no token has a teacher's score")
