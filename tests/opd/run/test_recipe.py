"""How a new run learns: adapters, or all weights where that is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.tool_lab.run_lab import MODEL
from opd.run import config as run_config
from opd.run.config import RunConfig
from opd.run.defaults import resolve, single_machine
from opd.run.recipe import learning_rate, recipe, said
from opd.run.resuming import CONFIG_FILE, refuse_other_weights
from trainer.errors import ConfigError


def served(folder: Path, *overrides: str) -> RunConfig:
    return resolve(single_machine(str(MODEL), folder), None, list(overrides), None, recipe)


@pytest.mark.parametrize("word", ["false", "none", '"none"'])
def test_all_weights_train_at_a_rate_of_their_own(word: str, tmp_path: Path) -> None:
    config = served(tmp_path, f"trainer.lora={word}")
    assert config.trainer.lora is None
    assert config.trainer.learning_rate == 1e-4
    assert "full weights, rate 0.0001, 24 samples" in said(config)
    # The run's file says it too: what goes on with it has no recipe.
    run_config.save(config, tmp_path / CONFIG_FILE)
    assert run_config.load(tmp_path / CONFIG_FILE).trainer.lora is None


def test_adapters_are_the_recipes(tmp_path: Path) -> None:
    config = served(tmp_path)
    assert config.trainer.lora is not None
    assert config.trainer.learning_rate == 3e-4
    assert "LoRA of rank 8, rate 0.0003" in said(config)
    mine = served(tmp_path, "trainer.lora=false", "trainer.learning_rate=3e-5")
    assert mine.trainer.learning_rate == 3e-5


@pytest.mark.parametrize("word", ["true", "off", "8"])
def test_other_words_are_a_line_that_says_what_to_write(word: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^trainer\.lora: got .*trainer\.lora=false") as raised:
        served(tmp_path, f"trainer.lora={word}")
    assert "\n" not in str(raised.value)


def test_a_step_moves_an_output_by_as_much_at_any_width() -> None:
    assert {learning_rate(width, full_weights=False) for width in (128, 2048, None)} == {3e-4}
    assert learning_rate(128, full_weights=True) == 1e-4
    assert learning_rate(576, full_weights=True) == 2.2e-5
    assert learning_rate(2048, full_weights=True) == 6.3e-6
    assert learning_rate(None, full_weights=True) == 6.3e-6


def test_a_run_keeps_the_kind_of_weights_that_it_began_with(tmp_path: Path) -> None:
    refuse_other_weights(tmp_path, served(tmp_path, "trainer.lora=false"))
    run_config.save(served(tmp_path), tmp_path / CONFIG_FILE)
    refuse_other_weights(tmp_path, served(tmp_path, "trainer.lora.alpha=8"))
    with pytest.raises(ConfigError, match="a run that trains adapters"):
        refuse_other_weights(tmp_path, served(tmp_path, "trainer.lora=false"))
