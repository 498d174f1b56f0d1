"""The hooks read a run's settings as the run does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from opd.run.config import load, save
from opd.run.defaults import as_planned
from opd.run.recipe import recipe
from tests.examples.shipped import MODEL
from trainer.slime.hooks import _trainer


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["trainer.correction.preset=geo_rs", "trainer.lora=false"],
        ["trainer.objective.name=hindsight_opd", "trainer.adam_betas=[0.8, 0.9]"],
    ],
)
def test_the_trainer_s_section_is_that_of_the_run(overrides: list[str], tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    save(as_planned(str(MODEL), None, overrides, recipe), file)
    assert _trainer(SimpleNamespace(hindsight_config=file)) == load(file).trainer
