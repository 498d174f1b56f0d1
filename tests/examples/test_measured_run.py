"""Which version a run of the lab measures at its end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from examples.tool_lab.measured_run import served_version
from records.store import Store
from rollout_bridge.guard.checks import Checked, add_check
from tests.records.builders import a_version
from tests.records.new_store import new_store
from trainer.errors import StartupError


def an_engine(version: int) -> Any:
    """One that serves this version, whatever was trained."""

    async def model_info() -> SimpleNamespace:
        return SimpleNamespace(weight_version=str(version))

    return SimpleNamespace(model_info=model_info)


def checked(version: int, *breaches: str) -> Checked:
    figures = {"kl": 0.0, "tokens": 9.0, "surprise": 0.1, "repeated": 0.0}
    counts = {"time": 0.0, "passed": 4, "asked": 4}
    return Checked(version=version, breaches=list(breaches), **figures, **counts)


async def test_the_newest_version_or_the_newest_that_passed(tmp_path: Path) -> None:
    async with await Store.open(new_store(tmp_path / "records.db")) as store:
        for number in (1, 2, 3):
            await store.commit_step(version=a_version(number), results=[])
        assert await served_version(an_engine(3), store, tmp_path) == 3
        with pytest.raises(StartupError, match="serves version 1 and not the trained 3"):
            await served_version(an_engine(1), store, tmp_path)
        for row in (checked(0), checked(1), checked(2, "guard.max_kl")):
            add_check(tmp_path, row)
        assert await served_version(an_engine(1), store, tmp_path) == 1
        for version in (0, 2):
            with pytest.raises(StartupError, match=f"serves version {version} and not"):
                await served_version(an_engine(version), store, tmp_path)
