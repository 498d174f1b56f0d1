"""`opd hints` as it is called."""

from __future__ import annotations

import asyncio
from pathlib import Path

from typer.testing import CliRunner, Result

from records.store import Store
from tests.records.hints.test_memory import objected
from trainer import run_config
from trainer.cli import app


def opd(config_file: Path, command: str, *arguments: object) -> Result:
    words = ["hints", command, "--run", str(config_file.parent), *map(str, arguments)]
    return CliRunner().invoke(app, words)


def object_to_something(config_file: Path) -> None:
    async def run() -> None:
        async with await Store.open(run_config.load(config_file).store) as store:
            await objected(store, "use Celsius", scope="tenant:acme")

    asyncio.run(run())


def test_a_hint_is_listed_shown_and_deleted(config_file: Path) -> None:
    assert "nobody has objected" in opd(config_file, "list").output
    object_to_something(config_file)
    [line] = opd(config_file, "list").output.splitlines()
    assert line.endswith("use Celsius")
    assert "not examined yet" in line
    hint_id = line.split()[0]
    shown = opd(config_file, "show", hint_id)
    assert shown.exit_code == 0
    assert "gap: not measured" in shown.output
    assert "3 of 3 votes" in shown.output
    assert "    I wanted Celsius." in shown.output
    assert opd(config_file, "list", "--tenant", "acme").output.splitlines() == [line]
    assert opd(config_file, "list", "--tenant", "other").output.startswith("no hints")
    deleted = opd(config_file, "delete", hint_id)
    assert "no version of the policy had trained on it" in deleted.output
    assert opd(config_file, "list", "--status", "deleted").output.startswith(hint_id)


def test_what_is_not_there_is_said_in_a_line(config_file: Path) -> None:
    for command in ("show", "delete"):
        refused = opd(config_file, command, "hint_x")
        assert refused.exit_code == 2
        assert "no hint 'hint_x' in this run" in refused.output
    refused = opd(config_file, "list", "--status", "gone")
    assert refused.exit_code == 2
    assert "--status 'gone': one of active" in refused.output
