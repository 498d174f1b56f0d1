"""The settings that the lab ships are settings that a run takes."""

from __future__ import annotations

from pathlib import Path

from examples.tool_lab.run_lab import LAB_VALUES, MODEL
from trainer.defaults import resolve, single_machine
from trainer.run_config import merge


def test_three_preferences(tmp_path: Path) -> None:
    values = merge(single_machine(str(MODEL), tmp_path), LAB_VALUES)
    file = MODEL.parent / "three_preferences.toml"
    config = resolve(values, file, ["trainer.max_steps=25"])
    assert config.trainer.objective.name == "topk_tail_reverse_kl"
    assert (config.trainer.rollout_batch_size, config.trainer.epochs_per_batch) == (32, 4)
    assert config.trainer.teacher.in_trainer
    assert (config.judge.temperature, config.judge.votes) == (0.3, 3)
    plain = resolve(values, file, ["trainer.objective.name=hindsight_opd"])
    assert plain.trainer.objective.name == "hindsight_opd"
