"""Metrics of the batch of one slime step, before the step, under the names of the embedded trainer.
slime logs these under `rollout/`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from records.types import Logprobs
from rollout_bridge.rehearsal.kinds import LIVE
from rollout_bridge.slime.carrier import BatchFacts
from trainer.batch.token_batch import Correction, CorrectionRows
from trainer.batch.token_figures import advantage_quantiles


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFigures:
    """One turn as every rank sees it, on the CPU: all [R], before the step and at temperature 1.

    `rollout` is NaN where it cannot be compared at temperature 1.
    """

    index: int
    old: Tensor
    rollout: Tensor
    teacher: Tensor
    opd_valid: Tensor
    num_rejected: float
    is_comparable: bool
    temperature: float
    after_tool: bool
    version_gap: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """Metrics of a batch, and its health warnings, a line each."""

    metrics: dict[str, float]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageFigures:
    """Of each rank: sums over the advantages of its tokens that train, and these advantages."""

    moments: Sequence[Mapping[str, float]]
    advantages: Sequence[Logprobs]


NOTHING = BatchReport(metrics={}, warnings=())


def batch_metrics(
    turns: Sequence[TurnFigures],
    facts: BatchFacts,
    correction: Correction,
    *,
    settled: AdvantageFigures,
    tokens: float,
    num_nonfinite: float,
) -> BatchReport:
    """Metrics of the whole batch, NaN where nothing was measured; the same keys for every batch,
    except that one with lessons has the gap of each kind that it contains.
    """
    found = corrected(turns, correction)
    by_kind = _gaps_by_kind(turns, facts)
    names = ("adv", "adv_squared", "adv_positive", "gap_abs", "tokens_with_teacher")
    moments = settled.moments
    sums = {name: sum(moment[name] for moment in moments) for name in names}
    taught = sums["tokens_with_teacher"]
    count = max(tokens, 1.0)
    mean = sums["adv"] / count
    variance = max(sums["adv_squared"] / count - mean * mean, 0.0)
    number = len(turns)
    metrics = (
        found.metrics
        | advantage_quantiles(settled.advantages)
        | {
            "opd/adv_mean": mean,
            "opd/adv_std": math.sqrt(variance),
            "opd/adv_abs_max": max((moment["adv_abs_max"] for moment in moments), default=0.0),
            "opd/adv_pos_frac": sums["adv_positive"] / count,
            "teacher_student_absdiff": sums["gap_abs"] / taught if taught > 0 else math.nan,
            "opd/frac_opd_samples": facts.num_taught / number if number else math.nan,
            "opd/num_eligible_samples": float(
                sum(bool((turn.opd_valid > 0).any()) for turn in turns)
            ),
            "opd/frac_tokens_with_kd": sums["tokens_with_teacher"] / count,
            "guard/nonfinite_tokens": num_nonfinite,
            "guard/rejected_tokens": sum(turn.num_rejected for turn in turns),
            "guard/empty_batch": float(tokens == 0),
            "guard/modified_turns": float(sum(not turn.is_comparable for turn in turns)),
            "guard/other_temperature_turns": float(
                sum(turn.is_comparable and turn.temperature != 1.0 for turn in turns)
            ),
            # slime has keys of its own that are called `tokens` and so on.
            "batch/turns": float(number),
            "batch/tokens": tokens,
            "batch/sequences": float(facts.num_rows),
            **by_kind,
        }
    )
    return BatchReport(metrics=metrics, warnings=found.warnings)


def _gaps_by_kind(turns: Sequence[TurnFigures], facts: BatchFacts) -> dict[str, float]:
    """As `trainer.step.report.lesson_gaps`: the mean |teacher - policy| of the tokens of each
    kind that have a teacher, in nats. Empty for a batch without lessons.
    """
    kinds = [facts.turns[turn.index].kind for turn in turns]
    if all(kind == LIVE for kind in kinds):
        return {}
    gaps: dict[str, list[Tensor]] = {}
    for kind, turn in zip(kinds, turns, strict=True):
        gap = (turn.teacher - turn.old)[turn.opd_valid > 0].abs()
        gaps.setdefault(kind, []).append(gap[torch.isfinite(gap)].double())
    means = {kind: torch.cat(found) for kind, found in gaps.items()}
    return {f"lessons/gap_{kind}": float(gap.mean()) for kind, gap in means.items() if len(gap)}


def corrected(turns: Sequence[TurnFigures], correction: Correction) -> BatchReport:
    """Trainer against rollout engine over the whole batch, where the two can be compared."""
    names = sorted(_reported(_ANY_TURN, correction).metrics)
    if not turns:
        return BatchReport(metrics=dict.fromkeys(names, math.nan), warnings=())
    found = _reported(turns, correction)
    metrics = {name: found.metrics.get(name, math.nan) for name in names}
    return BatchReport(metrics=metrics, warnings=found.warnings)


def _reported(turns: Sequence[TurnFigures], correction: Correction) -> BatchReport:
    rows = CorrectionRows()
    for turn in turns:
        rows.train[turn.index] = turn.old
        rows.rollout[turn.index] = turn.rollout
        rows.after_tool[turn.index] = torch.full_like(turn.old, float(turn.after_tool))
        rows.fresh[turn.index] = torch.full_like(turn.old, float(turn.version_gap == 0))
    result = correction.report(rows)
    # What the guards count is counted here, over more than what can be compared.
    metrics = {
        name: value for name, value in result.metrics.items() if not name.startswith("guard/")
    }
    return BatchReport(metrics=metrics, warnings=result.warnings)


_ONE_TOKEN = torch.zeros(1)
_ANY_TURN = (
    TurnFigures(
        index=0,
        old=_ONE_TOKEN,
        rollout=_ONE_TOKEN,
        teacher=_ONE_TOKEN,
        opd_valid=_ONE_TOKEN,
        num_rejected=0.0,
        is_comparable=True,
        temperature=1.0,
        after_tool=False,
        version_gap=0,
    ),
)
"""A batch that shows which metrics a correction reports."""
