"""The configuration of a run on one machine: embedded engines, SQLite, everything on loopback.

Plain nested values, to be laid over by a file and by overrides before they are validated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer import run_config
from trainer.run_config import ConfigError


def single_machine(model: str, folder: Path) -> dict[str, Any]:
    """Policy and frozen engine from `model`, both embedded; store and outputs in `folder`."""
    engine = {"model": model, "port": 0}
    return {
        "model": model,
        "store": {"url": f"sqlite+aiosqlite:///{folder.resolve() / 'records.db'}"},
        "policy": {"embedded": dict(engine)},
        "frozen": {"embedded": dict(engine)},
        # The judge's address is filled in by `resolve` when it is the frozen engine.
        "judge": {},
        "trainer": {"run_folder": str(folder.resolve())},
    }


def resolve(values: dict[str, Any], file: Path | None, overrides: list[str]) -> dict[str, Any]:
    """`values`, then the file's, then the overrides."""
    if file is not None:
        values = run_config.merge(values, run_config.read_toml(file))
    return run_config.merge(values, run_config.parse_overrides(overrides))


def with_judge(values: dict[str, Any], frozen_url: str) -> dict[str, Any]:
    """`values` with the frozen engine as judge, where no other judge is named."""
    judge = values.get("judge", {})
    if "base_url" in judge:
        return values
    if "model" in judge:
        raise ConfigError(
            "judge.model: names a model without judge.base_url, the server that has it"
        )
    own = {"base_url": f"{frozen_url}/v1", "model": values["model"]}
    return run_config.merge(values, {"judge": own})
