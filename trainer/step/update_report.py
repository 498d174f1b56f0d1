"""What one update says about itself, and what every update must say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from records.names import DropReason
from records.types import Logprobs, ReadySample
from trainer.objectives.options import ObjectiveOptions
from trainer.objectives.policy.combined import term_ratio

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
    """How large the terms are that stand beside a policy gradient, in parts of it; above 1 a term
    dominates (ALGORITHMS 7.4). `reduced` are the means of a whole batch.
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
    NaN for a token that did not train. `untrained` says by index why a sample has no such token
    where that was not a log-prob of the trainer's. `warnings` are those of rollout correction.
    """

    skipped: DropReason | None
    metrics: dict[str, float]
    advantages: list[Logprobs]
    untrained: Mapping[int, DropReason] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def among(self, kept: Sequence[int], samples: Sequence[ReadySample]) -> UpdateReport:
        """This report of the `kept` ones as one of all `samples`: the others' teacher failed."""
        advantages = [np.full(len(one.response_ids), np.nan, np.float32) for one in samples]
        for index, own in zip(kept, self.advantages, strict=True):
            advantages[index] = own
        lost = set(range(len(samples))) - set(kept)
        failed = dict.fromkeys(lost, DropReason.TEACHER_LOGPROBS_INVALID)
        return replace(
            self,
            metrics=self.metrics | {"guard/teacher_invalid_turns": float(len(lost))},
            advantages=advantages,
            untrained=failed | {kept[index]: why for index, why in self.untrained.items()},
        )
