"""Settings of the trainer that contradict each other are refused in one line."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.config import TrainerConfig
from trainer.objectives.options import OBJECTIVE_NAMES

UNCORRECTED: list[dict[str, Any]] = [
    {"objective": {"name": "supervised_opd"}},
    {"objective": {"name": "forward_kl_topk"}},
    {"objective": {"name": "topk_tail_reverse_kl"}},
    {"objective": {"name": "overlap_topk"}},
    {"objective": {"name": "sparse_kl"}},
    {"objective": {"name": "self_distillation"}, "correction": {"importance_level": "none"}},
    {"objective": {"name": "side_samples", "importance": False}},
    {"objective": {"name": "side_samples", "direction": "forward"}},
    {"objective": {"name": "hindsight_opd"}, "correction": {"importance_level": "none"}},
]
CORRECTED: list[dict[str, Any]] = [
    {"objective": {"name": "hindsight_opd"}},
    {"objective": {"surrogate": "decoupled"}, "correction": {"importance_level": "none"}},
    {"objective": {"name": "self_distillation"}},
    {"objective": {"name": "side_samples"}},
]


@pytest.mark.parametrize("values", UNCORRECTED)
def test_turns_train_again_only_if_their_age_is_corrected_for(values: dict[str, Any]) -> None:
    assert TrainerConfig.model_validate(values).replay_times == 1
    with pytest.raises(
        ValueError, match=r"replay_times above 1 .* does not correct for that"
    ) as no:
        TrainerConfig.model_validate({**values, "replay_times": 2})
    [error] = no.value.errors()  # type: ignore[attr-defined]
    assert "\n" not in error["msg"]


@pytest.mark.parametrize("values", CORRECTED)
def test_turns_train_again_with_a_ratio_to_the_weights_that_sampled(values: dict[str, Any]) -> None:
    assert TrainerConfig.model_validate({**values, "replay_times": 2}).replay_times == 2


def test_every_objective_is_one_or_the_other() -> None:
    named = {one["objective"].get("name", "hindsight_opd") for one in UNCORRECTED + CORRECTED}
    assert named == set(OBJECTIVE_NAMES)
