"""What one update says about itself, and what every update must say."""

from __future__ import annotations

from dataclasses import dataclass

from records.names import DropReason
from records.types import Logprobs

STATISTIC_KEYS = frozenset(
    {
        "opd/adv_mean",
        "opd/adv_std",
        "opd/adv_abs_max",
        "opd/adv_pos_frac",
        "teacher_student_absdiff",
        "ratio_max",
        "opd/frac_opd_samples",
        "opd/num_eligible_samples",
        "opd/frac_tokens_with_kd",
        "guard/nonfinite_tokens",
        "guard/empty_batch",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """`skipped` is None if the weights changed. `advantages` has [R] values per sample, in order,
    NaN for a token that did not train. `warnings` are those of rollout correction.
    """

    skipped: DropReason | None
    metrics: dict[str, float]
    advantages: list[Logprobs]
    warnings: tuple[str, ...] = ()
