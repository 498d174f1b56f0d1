"""The learning rate of each step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from pydantic import ValidationError

from trainer.config import TrainerConfig
from trainer.step.learning_rate import learning_rate_at


def rates(**values: Any) -> list[float]:
    config = TrainerConfig.model_validate({"learning_rate": 1.0, **values})
    return [learning_rate_at(step, config) for step in range(config.max_steps or 6)]


def test_constant_after_the_warmup() -> None:
    assert rates(warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_ends_one_step_before_zero() -> None:
    assert rates(lr_decay_style="linear", max_steps=4) == [1.0, 0.75, 0.5, 0.25]
    assert rates(lr_decay_style="linear", max_steps=4, warmup_steps=2) == [0.5, 1.0, 1.0, 0.5]


def test_cosine() -> None:
    assert rates(lr_decay_style="cosine", max_steps=4) == pytest.approx(
        [1, 0.8535534, 0.5, 0.1464466]
    )
    falling = rates(lr_decay_style="cosine", max_steps=50, warmup_steps=5)[5:]
    assert all(before > after > 0 for before, after in pairwise(falling))


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_a_decay_needs_its_end(style: str) -> None:
    with pytest.raises(ValidationError, match="needs max_steps"):
        TrainerConfig.model_validate({"lr_decay_style": style})


def test_a_warmup_ends_before_the_run() -> None:
    with pytest.raises(ValidationError, match="less than max_steps 4"):
        TrainerConfig.model_validate({"warmup_steps": 4, "max_steps": 4})
