"""Continuing a run: its folder's own configuration counts, and every change to it is reported.

A run folder belongs to one command and to one start model. What a command is given in addition
(options, `--set`) is laid over the run's `config.toml`; a settings file that differs is refused,
because nobody sees which of its lines would be new. It starts nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opd.processes.supervisor import listen_problem
from opd.run import config as run_config
from opd.run.config import MadeBy, RunConfig
from opd.run.defaults import single_machine
from records.config import StoreConfig
from trainer.errors import ConfigError, StartupError

CONFIG_FILE = "config.toml"
_SHOWN = 5
_NOT_SETTINGS = ("policy.embedded.port", "frozen.embedded.port", "made_by", "store.url")
"""What each start may choose anew, without reporting it."""
_SECRET = "judge.api_key"


def base_values(
    folder: Path, command: MadeBy, model: str | None, default_model: str | None = None
) -> dict[str, Any]:
    """The values to start from: those of the run in `folder`, or of a new one with `model`.

    Raises StartupError for a folder of another command or of another model, and for a new run
    without a model.
    """
    if not is_run(folder):
        if folder.exists() and not folder.is_dir():
            raise StartupError(f"--run {folder}: it is a file; name a folder")
        chosen = model or default_model
        if chosen is None:
            raise StartupError(f"--model: name the start weights, {folder} is a new run")
        return {**single_machine(chosen, folder), "made_by": command}
    saved = run_config.read_toml(folder / CONFIG_FILE)
    _refuse_other_command(folder, saved, command)
    known = run_config.build(saved)
    _refuse_other_model(folder, known.model, model)
    return {**_startable(saved, known, folder), "made_by": command}


def is_run(folder: Path) -> bool:
    """Whether a run's configuration is there."""
    return (folder / CONFIG_FILE).is_file()


def refuse_other_settings(folder: Path, file: Path | None) -> None:
    """Raise ConfigError if `file` differs from the run that is already in `folder`."""
    if file is None or not is_run(folder):
        return
    saved = run_config.read_toml(folder / CONFIG_FILE)
    other = run_config.build(run_config.merge(saved, run_config.read_toml(file)))
    found = changes(run_config.build(saved), other)
    if found:
        rest = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise ConfigError(
            f"--config {file}: {folder} is a run with its own settings, and the file changes "
            f"{', '.join(found[:_SHOWN])}{rest}: change them with --set, or use a new folder "
            "(--run)"
        )


def changes_since(folder: Path, config: RunConfig) -> list[str]:
    """What `config` changes in the run that is already in `folder`, as `key old -> new`."""
    if not is_run(folder):
        return []
    return changes(run_config.build(run_config.read_toml(folder / CONFIG_FILE)), config)


def refuse_other_weights(folder: Path, config: RunConfig) -> None:
    """Raise ConfigError if an existing run would train adapters instead of all its weights, or the
    other way round: its optimiser and checkpoints are of one kind.
    """
    if not is_run(folder):
        return
    had = run_config.build(run_config.read_toml(folder / CONFIG_FILE)).trainer.lora
    if (had is None) != (config.trainer.lora is None):
        kind = "all weights" if had is None else "adapters"
        raise ConfigError(
            f"trainer.lora: {folder} is a run that trains {kind}: use a new folder (--run)"
        )


def changes(old: RunConfig, new: RunConfig) -> list[str]:
    """Settings that differ, as `key old -> new`."""
    before, after = _flat(old.model_dump(mode="json")), _flat(new.model_dump(mode="json"))
    if _judged_by_frozen(old) and _judged_by_frozen(new):
        after["judge.base_url"] = before["judge.base_url"]
    found = []
    for key in sorted(before.keys() | after.keys()):
        was, is_now = before.get(key), after.get(key)
        if was != is_now and key not in _NOT_SETTINGS:
            found.append(f"{key} {'unset' if was is None else was} -> {is_now}")
    if old.judge.api_key != new.judge.api_key:
        found.append(f"{_SECRET}, which is not shown")
    return found


def made_by(folder: Path, saved: dict[str, Any]) -> str | None:
    """The command whose run this is; for a run that does not say it, by the files that each command
    leaves.
    """
    if "made_by" in saved:
        return str(saved["made_by"])
    if (folder / "lab.toml").exists():
        return "lab"
    if (folder / "logs" / "proxy.log").exists():
        return "serve"
    if "cluster" in saved:
        return "slime"
    return "replay" if (folder / "import_problems.jsonl").exists() else None


def identity(model: str) -> str:
    """A model's absolute folder, so that two ways to write it are equal; a hub id as it is."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def _refuse_other_command(folder: Path, saved: dict[str, Any], command: MadeBy) -> None:
    owner = made_by(folder, saved)
    if owner in (None, command):
        return
    what = "the tool lab" if owner == "lab" else f"`opd {owner}`"
    into = f", or hand the recordings to it (opd replay ... --into {folder})"
    raise StartupError(
        f"--run {folder}: it is a run of {what}, whose configuration and report would be "
        f"overwritten: use another folder{into if command == 'replay' else ''}"
    )


def _refuse_other_model(folder: Path, own: str, given: str | None) -> None:
    if given is not None and identity(given) != identity(own):
        raise StartupError(
            f"--model {given}: {folder} is a run that started from {own}; leave --model out, or "
            "use a new folder (--run)"
        )


def _startable(saved: dict[str, Any], known: RunConfig, folder: Path) -> dict[str, Any]:
    """The run's values without what belonged only to its last start."""
    values = dict(saved)
    for role in ("policy", "frozen"):
        embedded = getattr(known, role).embedded
        is_shared = role == "frozen" and known.frozen.shared
        if embedded is not None and (is_shared or listen_problem(embedded.host, embedded.port)):
            section = {**values[role], "embedded": {**values[role]["embedded"], "port": 0}}
            values[role] = section
    if _judged_by_frozen(known):
        # Worked out again, once the engine's port is known.
        judge = values["judge"].items()
        values["judge"] = {key: one for key, one in judge if key not in ("base_url", "model")}
    here = folder.resolve() / "records.db"
    if known.store.is_sqlite and here.is_file():
        # The folder may have been moved since.
        values["store"] = {**values["store"], "url": StoreConfig.sqlite(here).url}
    return values


def _judged_by_frozen(config: RunConfig) -> bool:
    frozen = config.frozen
    is_own = frozen.url is None and frozen.embedded is not None
    return is_own and config.judge.base_url == f"{frozen.base_url}/v1"


def _flat(values: dict[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{above}{key}.")
        elif value is not None:
            found[f"{above}{key}"] = value
    return found
