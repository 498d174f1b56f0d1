"""The settings that the lab ships are settings that a run takes."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from benchmarks.objectives import SETTINGS
from examples.tool_lab.__main__ import lab
from examples.tool_lab.lab_config import LabConfig
from examples.tool_lab.run_lab import LAB_VALUES, LIVE_TURNS, MODEL, run
from opd.run import recipe
from opd.run.checks import run_warnings
from opd.run.config import merge
from opd.run.defaults import resolve, single_machine
from trainer.errors import ConfigError


def lab_values(folder: Path) -> dict:
    """Of a lab that learns from its users' own turns alone."""
    return merge(merge(single_machine(str(MODEL), folder), LAB_VALUES), LIVE_TURNS)


def test_the_lab_learns_as_serve_does(tmp_path: Path) -> None:
    values = merge(single_machine(str(MODEL), tmp_path), LAB_VALUES)
    config = resolve(values, None, [], None, recipe.recipe)
    served = resolve(single_machine(str(MODEL), tmp_path), None, [], None, recipe.recipe)
    assert config.trainer == served.trainer
    assert config.rehearsal == served.rehearsal
    assert config.rehearsal.enabled


def test_a_control_is_not_practised() -> None:
    assert LabConfig().rehearses
    assert not LabConfig(hints="contrary").rehearses
    assert not LabConfig(rehearsal=False).rehearses


def test_recipe_of_live_turns(tmp_path: Path) -> None:
    config = resolve(lab_values(tmp_path), None, ["trainer.max_steps=8"])
    assert config.trainer.objective.name == "topk_tail_reverse_kl"
    assert (config.trainer.rollout_batch_size, config.trainer.epochs_per_batch) == (32, 4)
    assert config.scoring.top_k == config.trainer.objective.topk == 8
    assert (config.judge.temperature, config.judge.votes) == (0.3, 3)
    assert run_warnings(config.trainer) == []


def test_another_objective_takes_the_recipes_place(tmp_path: Path) -> None:
    config = resolve(lab_values(tmp_path), None, ["trainer.objective.name=hindsight_opd"])
    assert config.trainer.objective.name == "hindsight_opd"


def test_token_level(tmp_path: Path) -> None:
    config = resolve(lab_values(tmp_path), MODEL.parent / "token_level.toml", [])
    assert config.trainer.objective.name == "hindsight_opd"
    assert config.scoring.top_k == 0


@pytest.mark.parametrize("setting", sorted(SETTINGS))
def test_every_setting_of_the_comparison_goes_with_the_recipe(setting: str, tmp_path: Path) -> None:
    config = resolve(lab_values(tmp_path), None, SETTINGS[setting])
    assert f"trainer.objective.name={config.trainer.objective.name}" in SETTINGS[setting]
    assert (config.trainer.rollout_batch_size, config.trainer.epochs_per_batch) == (32, 4)


def test_a_wrong_setting_leaves_no_folder_in_the_way(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    with pytest.raises(ConfigError, match=r"scoring\.top_k"):
        run(LabConfig(), folder, None, ["scoring.top_k=0"])
    assert not folder.exists()


def test_options_and_settings_have_the_same_defaults() -> None:
    options = inspect.signature(lab).parameters
    settings = LabConfig()
    assert options["updates"].default == settings.updates
    assert options["open_users"].default == settings.open_users
    assert options["rehearsal"].default == settings.rehearsal
    assert options["max_seconds"].default == settings.max_seconds
    assert options["sessions"].default == settings.sessions_in_flight
    assert options["eval_samples"].default == settings.eval_samples
