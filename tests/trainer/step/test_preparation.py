"""Figures of the whole batch."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.objectives.options import HindsightOpd
from trainer.step.preparation import batch_statistics


@pytest.mark.parametrize(
    "options", [{"normalise": True}, {"surrogate": "m2po", "reward_coef": 1.0}]
)
def test_a_token_without_a_finite_log_prob_is_no_part_of_the_figures(options: Any) -> None:
    """It is dropped from the loss, so the others train as if it were not there."""

    def found(teacher: list[float], student: list[float]) -> tuple[float, ...]:
        ones = torch.ones(len(teacher))
        view: Any = SimpleNamespace(
            teacher=torch.tensor(teacher),
            opd_valid=ones,
            reward_advantage=-9 * ones,
            rollout=torch.full_like(ones, -1.0),
        )
        now = torch.tensor(student)
        score: Any = SimpleNamespace(logprobs=now, logprobs_sampled=now)
        figures = batch_statistics(HindsightOpd(**options), [view], [score])
        return figures.gap_mean, figures.gap_std, figures.clip_low, figures.clip_high

    whole = found([-1.0, -2.0, -0.5, -3.0], [-1.1, -1.0, -0.9, -1.05])
    for broken in (math.nan, -math.inf):
        with_one = found([-1.0, -2.0, -3.0, -0.5, -3.0], [-1.1, -1.0, broken, -0.9, -1.05])
        assert with_one == pytest.approx(whole, nan_ok=True)
