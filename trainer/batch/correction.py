"""Rollout correction inside the trainer: weights and masks of turns, metrics of the batch.

A row is a turn, so no statistic crosses turns. A turn's weights depend on its own tokens, so
micro-batches are corrected one by one; only a normalisation over the batch needs all of it first.

Shapes: S turns, R tokens of the longest response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer.batch.collate import MicroBatch, pad_rows
from trainer.batch.turn_scores import TurnScores
from trainer.batch.views import TurnView
from trainer.objectives.rollout_correction.correct import CorrectionResult, correct_rollout
from trainer.objectives.rollout_correction.settings import RolloutCorrectionSettings

BASE_KEYS = frozenset(
    f"rollout_corr/{name}"
    for name in ("kl", "k3_kl", "ppl_ratio", "chi2_token", "chi2_seq", "rollout_is_veto_fraction")
)
WEIGHT_KEYS = frozenset(
    f"rollout_corr/{name}"
    for name in ("rollout_is_mean", "rollout_is_eff_sample_size", "rollout_is_max")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCorrection:
    """One turn's detached weights [R] (1 where none are applied) and mask [R]."""

    weights: Tensor
    mask: Tensor


@dataclass(slots=True)
class CorrectionRows:
    """The log-probs that were compared, turn by turn, collected over a pass; if `fresh` is empty,
    all are of the newest weights.
    """

    train: dict[int, Tensor] = field(default_factory=dict)
    rollout: dict[int, Tensor] = field(default_factory=dict)
    after_tool: dict[int, Tensor] = field(default_factory=dict)
    fresh: dict[int, Tensor] = field(default_factory=dict)

    def add(self, batch: MicroBatch, train_BT: Tensor, views: Sequence[TurnView]) -> None:
        """The turns of one micro-batch, at the sampling temperature."""
        for turn, values in batch.gather(train_BT).items():
            self.train[turn] = values.detach()
            self.rollout[turn] = views[turn].rollout
            self.after_tool[turn] = views[turn].after_tool
            self.fresh[turn] = (views[turn].version_gap == 0).to(values.dtype)


class Correction:
    """The configured correction; stateless."""

    def __init__(self, settings: RolloutCorrectionSettings):
        self.settings = settings

    @property
    def needs_whole_batch(self) -> bool:
        """Whether weights depend on other turns of the batch."""
        return self.settings.batch_normalize and self.settings.importance_level is not None

    @property
    def expected_keys(self) -> frozenset[str]:
        """Metrics that every report has."""
        has_weights = self.settings.importance_level is not None
        return BASE_KEYS | (WEIGHT_KEYS if has_weights else frozenset())

    def whole_batch(
        self, views: Sequence[TurnView], before: Sequence[TurnScores] | None
    ) -> dict[int, TurnCorrection] | None:
        """Corrections of all turns at once, where they depend on each other."""
        if not self.needs_whole_batch:
            return None
        if before is None:
            raise ValueError("a normalisation over the batch needs a pass of the student first")
        train = {turn: score.logprobs_sampled for turn, score in enumerate(before)}
        return self._turns(train, views)

    def micro_batch(
        self, train_BT: Tensor, batch: MicroBatch, views: Sequence[TurnView]
    ) -> dict[int, TurnCorrection]:
        """Corrections of one micro-batch's turns; `train_BT` are the log-probs to compare."""
        return self._turns(batch.gather(train_BT.detach()), views)

    def report(self, rows: CorrectionRows) -> CorrectionResult:
        """Metrics and warnings of the whole batch."""
        return self._correct(rows.train, rows.rollout, rows.after_tool, rows.fresh or None)

    def _turns(
        self, train: dict[int, Tensor], views: Sequence[TurnView]
    ) -> dict[int, TurnCorrection]:
        after_tool = None
        if self.settings.post_tool_upper is not None:
            after_tool = {turn: views[turn].after_tool for turn in train}
        result = self._correct(train, {turn: views[turn].rollout for turn in train}, after_tool)
        corrected = {}
        for row, (turn, values) in enumerate(train.items()):
            length = len(values)
            weights = torch.ones_like(values)
            if result.weights_BT is not None:
                weights = result.weights_BT[row, :length].to(values.dtype)
            corrected[turn] = TurnCorrection(weights=weights, mask=result.mask_BT[row, :length])
        return corrected

    def _correct(
        self,
        train: dict[int, Tensor],
        rollout: dict[int, Tensor],
        after_tool: dict[int, Tensor] | None,
        fresh: dict[int, Tensor] | None = None,
    ) -> CorrectionResult:
        turns = list(train)

        def rows(values: dict[int, Tensor] | None) -> Tensor | None:
            return None if values is None else pad_rows([values[turn] for turn in turns], 0.0)

        return correct_rollout(
            pad_rows([train[turn] for turn in turns], 0.0),
            pad_rows([rollout[turn] for turn in turns], float("nan")),
            pad_rows([torch.ones_like(train[turn]) for turn in turns], 0.0),
            self.settings,
            after_tool_BT=rows(after_tool),
            fresh_BT=rows(fresh),
        )
