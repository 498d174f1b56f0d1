"""Configuration: overrides, strictness, the key that was meant, and the way to a file and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from opd.run import config as run_config
from trainer.errors import ConfigError


def values() -> dict[str, Any]:
    return {
        "model": "some/model",
        "store": {"url": "sqlite:////data/records.db"},
        "policy": {"url": "http://127.0.0.1:1"},
        "frozen": {"embedded": {"model": "some/model", "port": 7}},
        "judge": {"base_url": "http://127.0.0.1:7/v1", "model": "m", "api_key": "secret"},
        "scoring": {"context_length": 4096},
    }


def test_overrides_are_toml_where_they_parse_and_text_where_not() -> None:
    tree = run_config.parse_overrides(
        ["trainer.learning_rate=1e-4", "model=some/path", "trainer.tensorboard=false"]
    )
    assert tree == {"trainer": {"learning_rate": 1e-4, "tensorboard": False}, "model": "some/path"}


def test_override_without_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        run_config.parse_overrides(["trainer.learning_rate"])


def test_merge_lays_section_over_section_and_changes_neither() -> None:
    base = {"a": {"x": 1, "y": 2}, "b": 3}
    over = {"a": {"y": 5}}
    assert run_config.merge(base, over) == {"a": {"x": 1, "y": 5}, "b": 3}
    assert base == {"a": {"x": 1, "y": 2}, "b": 3}


@pytest.mark.parametrize(
    ("over", "merged"),
    [
        ({"topk": 4}, {"name": "one", "topk": 4}),
        ({"name": "one", "tail": True}, {"name": "one", "topk": 8, "tail": True}),
        ({"name": "other"}, {"name": "other"}),
    ],
)
def test_a_section_of_another_name_takes_the_place_of_its_base(
    over: dict[str, Any], merged: dict[str, Any]
) -> None:
    base = {"objective": {"name": "one", "topk": 8}}
    assert run_config.merge(base, {"objective": over}) == {"objective": merged}


@pytest.mark.parametrize(
    ("section", "wrong", "meant"),
    [
        ("trainer", "learning_rat", "learning_rate"),
        ("judge", "vote", "votes"),
        ("proxy", "idle_timeout", "idle_timeout_s"),
    ],
)
def test_unknown_key_names_the_nearest_valid_one(section: str, wrong: str, meant: str) -> None:
    wanted = run_config.merge(values(), {section: {wrong: 1}})
    with pytest.raises(ConfigError, match=rf"{section}\.{wrong}: unknown key; .*'{meant}'"):
        run_config.build(wanted)


def test_unknown_section_is_named_too() -> None:
    with pytest.raises(ConfigError, match="trainr: unknown key; did you mean 'trainer'"):
        run_config.build({**values(), "trainr": {}})


def test_saved_configuration_reads_back_equal_and_keeps_the_key_private(tmp_path: Path) -> None:
    config = run_config.build(values())
    path = tmp_path / "config.toml"
    run_config.save(config, path)
    assert path.stat().st_mode & 0o077 == 0
    loaded = run_config.load(path)
    assert loaded == config
    assert loaded.judge.api_key.get_secret_value() == "secret"


def test_engine_address_comes_from_the_url_or_the_embedded_engine() -> None:
    config = run_config.build(values())
    assert config.policy.base_url == "http://127.0.0.1:1"
    assert config.frozen.base_url == "http://127.0.0.1:7"
    with pytest.raises(ConfigError, match="set url"):
        _ = run_config.EngineConfig().base_url


def test_missing_file_and_broken_toml_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such configuration file"):
        run_config.load(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("a = [")
    with pytest.raises(ConfigError, match=r"broken\.toml: not valid TOML"):
        run_config.load(broken)
