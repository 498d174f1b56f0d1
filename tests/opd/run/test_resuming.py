"""Going on with a run: with its own settings, and with nothing changed in silence."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from examples.tool_lab.run_lab import MODEL
from opd.run import config as run_config
from opd.run.defaults import resolve, single_machine
from opd.run.resuming import base_values, changes_since, made_by, refuse_other_settings
from records.config import StoreConfig
from tests.opd.run.bad_starts import a_run
from trainer.errors import ConfigError, StartupError


def served_here(folder: Path, *overrides: str) -> Path:
    """A run whose judge is its own frozen engine, as `opd serve` leaves it."""
    folder.mkdir()
    values = {**single_machine(str(MODEL), folder), "made_by": "serve"}
    run_config.save(resolve(values, None, list(overrides)), folder / "config.toml")
    return folder


def test_a_run_goes_on_with_its_own_settings_and_says_what_is_changed(tmp_path: Path) -> None:
    run = served_here(tmp_path / "run", "trainer.learning_rate=1e-4", "judge.votes=5")
    saved = run_config.load(run / "config.toml")
    config = resolve(base_values(run, "serve", None), None, [])
    assert config == saved
    assert changes_since(run, config) == []
    config = resolve(base_values(run, "serve", None), None, ["judge.votes=3"])
    assert config.trainer.learning_rate == 1e-4
    assert changes_since(run, config) == ["judge.votes 5 -> 3"]


def test_a_port_that_was_taken_meanwhile_is_replaced_and_the_judge_follows(tmp_path: Path) -> None:
    run = served_here(tmp_path / "run")
    saved = run_config.load(run / "config.toml")
    assert saved.frozen.embedded is not None
    with socket.socket() as other:
        other.bind(("127.0.0.1", saved.frozen.embedded.port))
        other.listen()
        config = resolve(base_values(run, "serve", None), None, [])
    assert config.frozen.base_url != saved.frozen.base_url
    assert config.judge.base_url == f"{config.frozen.base_url}/v1"
    assert config.policy == saved.policy
    assert changes_since(run, config) == []


def test_a_run_with_one_engine_goes_on_with_one_or_with_two(tmp_path: Path) -> None:
    run = served_here(tmp_path / "run", "trainer.lora.rank=8", "frozen.shared=true")
    saved = run_config.load(run / "config.toml")
    assert saved.frozen.base_url == saved.policy.base_url
    config = resolve(base_values(run, "serve", None), None, [])
    assert config == saved
    config = resolve(base_values(run, "serve", None), None, ["frozen.shared=false"])
    assert config.frozen.base_url != config.policy.base_url
    assert config.judge.base_url == f"{config.frozen.base_url}/v1"
    assert changes_since(run, config) == ["frozen.shared True -> False"]


def test_a_file_of_settings_counts_only_where_it_says_what_the_run_says(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", "serve", trainer={"learning_rate": 1e-4})
    same, other = tmp_path / "same.toml", tmp_path / "other.toml"
    same.write_text("[trainer]\nlearning_rate = 1e-4\n")
    other.write_text("[trainer]\nlearning_rate = 2e-4\n")
    refuse_other_settings(run, same)
    refuse_other_settings(tmp_path / "new", other)
    with pytest.raises(ConfigError, match=r"learning_rate 0.0001 -> 0.0002: change them"):
        refuse_other_settings(run, other)


def test_a_folder_that_was_moved_keeps_its_records(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", "serve")
    (run / "records.db").touch()
    moved = run.rename(tmp_path / "moved")
    values = base_values(moved, "serve", None)
    assert StoreConfig.model_validate(values["store"]).sqlite_path == moved / "records.db"


def test_a_secret_that_changes_is_not_shown(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", "serve", judge={"api_key": "old-secret"})
    values = run_config.merge(base_values(run, "serve", None), {"judge": {"api_key": "new-secret"}})
    assert changes_since(run, run_config.build(values)) == ["judge.api_key, which is not shown"]


@pytest.mark.parametrize(
    ("left", "owner"),
    [
        ("lab.toml", "lab"),
        ("logs/proxy.log", "serve"),
        ("import_problems.jsonl", "replay"),
        ("anything", None),
    ],
)
def test_a_run_that_does_not_say_whose_it_is_is_known_by_what_it_left(
    tmp_path: Path, left: str, owner: str | None
) -> None:
    run = a_run(tmp_path / "run", None)
    (run / left).parent.mkdir(exist_ok=True)
    (run / left).touch()
    assert made_by(run, run_config.read_toml(run / "config.toml")) == owner


def test_another_model_or_none_is_refused(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", "serve")
    assert base_values(run, "serve", str(MODEL))["model"] == str(MODEL)
    assert base_values(run, "serve", f"{MODEL}/../model")["model"] == str(MODEL)
    with pytest.raises(StartupError, match="is a run that started from"):
        base_values(run, "serve", "some/other")
    with pytest.raises(StartupError, match="--model: name the start weights"):
        base_values(tmp_path / "new", "serve", None)
