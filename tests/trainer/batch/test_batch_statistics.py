"""Figures of the whole batch."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.batch.batch_statistics import batch_statistics
from trainer.objectives.options import HindsightOpd


def test_a_token_without_a_finite_log_prob_is_no_part_of_the_moments() -> None:
    """It is dropped from the loss, so the others train as if it were not there."""

    def found(teacher: list[float], student: list[float]) -> tuple[float, float]:
        ones = torch.ones(len(teacher))
        view: Any = SimpleNamespace(
            teacher=torch.tensor(teacher), opd_valid=ones, reward_advantage=0 * ones
        )
        score: Any = SimpleNamespace(logprobs=torch.tensor(student))
        figures = batch_statistics(HindsightOpd(normalise=True), [view], [score])
        return figures.gap_mean, figures.gap_std

    whole = found([-1.0, -2.0, -0.5], [-1.5, -1.0, -0.7])
    for broken in (math.nan, -math.inf):
        with_one = found([-1.0, -2.0, -3.0, -0.5], [-1.5, -1.0, broken, -0.7])
        assert with_one == pytest.approx(whole)
