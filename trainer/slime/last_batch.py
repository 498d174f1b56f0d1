"""Figures of a batch that only its steps show; the hook of the next batch reports them.

slime adds up what the loss hook returns, so extremes cannot go that way. Before the step it scores
at temperature 1 alone, so turns of another temperature can be compared with their engine only
afterwards.

Shapes: R tokens of a turn's response.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor

from trainer.batch.token_batch import Correction
from trainer.objectives.frame import ObjectiveResult
from trainer.slime.batch_metrics import NOTHING, BatchReport, TurnFigures, corrected
from trainer.slime.ranks import Ranks

PREFIX = "last_batch/"


class Compared(NamedTuple):
    """Log-probs [R] of a turn at its own temperature: the policy's before the step, and the
    engine's.
    """

    policy: Tensor
    engine: Tensor


@dataclass(slots=True)
class StepFigures:
    """What the loss hook of one rank saw of a batch: extremes of the newest step on it, and by
    index, from the first step, turns of another temperature than 1. Empty if slime's own loss
    trained it, which calls no hook.
    """

    epoch: int = 0
    ratios: list[float] = field(default_factory=list)
    """The largest of each micro-batch."""
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    heated: dict[int, Compared] = field(default_factory=dict)

    def note(self, result: ObjectiveResult, epoch: int) -> None:
        """Add a micro-batch."""
        if epoch != self.epoch:
            self.epoch, self.ratios, self.ranges = epoch, [], {}
        self.ratios.append(result.token_max["ratio_max"].item())
        self._widen({name: (a.item(), b.item()) for name, (a, b) in result.token_ranges.items()})

    def joined(self, other: StepFigures) -> StepFigures:
        """Of the rows of both."""
        both = StepFigures(
            epoch=self.epoch,
            ratios=self.ratios + other.ratios,
            ranges=dict(self.ranges),
            heated=self.heated | other.heated,
        )
        both._widen(other.ranges)
        return both

    def _widen(self, ranges: dict[str, tuple[float, float]]) -> None:
        for name, (low, high) in ranges.items():
            least, most = self.ranges.get(name, (math.inf, -math.inf))
            self.ranges[name] = (min(least, low), max(most, high))


@dataclass(frozen=True, slots=True, kw_only=True)
class LastBatch:
    """A batch whose steps are taken; `turns` are those of all ranks, `own` is of this rank."""

    turns: Sequence[TurnFigures]
    correction: Correction
    own: StepFigures

    def report(self, ranks: Ranks) -> BatchReport:
        """Its metrics, the names of the embedded trainer behind `PREFIX`: extremes, and those of
        rollout correction if they lack turns so far. Nothing that no hook has seen.
        """
        parts: list[StepFigures] = ranks.of_all(self.own)
        if not self.turns:
            return NOTHING
        seen = parts[0]
        for part in parts[1:]:
            seen = seen.joined(part)
        metrics = {"ratio_max": max(seen.ratios)} if seen.ratios else {}
        for name, (low, high) in seen.ranges.items():
            metrics |= {f"{name}_min": low, f"{name}_max": high}
        warnings: tuple[str, ...] = ()
        if seen.heated:
            found = corrected([_whole(one, seen.heated) for one in self.turns], self.correction)
            metrics |= found.metrics
            warnings = tuple(f"the batch before: {one}" for one in found.warnings)
        return BatchReport(
            metrics={f"{PREFIX}{name}": value for name, value in metrics.items()},
            warnings=warnings,
        )


def _whole(figures: TurnFigures, heated: dict[int, Compared]) -> TurnFigures:
    """With log-probs at the turn's own temperature."""
    found = heated.get(figures.index)
    if found is None:
        return figures
    return replace(figures, old=found.policy, rollout=found.engine)
