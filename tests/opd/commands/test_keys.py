"""`opd keys` as it is called, and the refusal to open the door to others without a key."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from opd.cli.app import app
from opd.commands.keys import refuse_open_door
from opd.run import config as run_config
from records.keys import ApiKey, Keys, parsed
from records.store import Store
from trainer.errors import StartupError


def opd(config_file: Path, command: str, *arguments: object) -> Result:
    words = ["keys", command, "--run", str(config_file.parent), *map(str, arguments)]
    return CliRunner().invoke(app, words)


def stored(config_file: Path) -> list[ApiKey]:
    async def run() -> list[ApiKey]:
        async with await Store.open(run_config.load(config_file).store) as store:
            return await Keys(store, lambda: 0.0).all()

    return asyncio.run(run())


def test_a_key_from_its_making_to_its_end(config_file: Path) -> None:
    made = opd(config_file, "create", "--name", "ci", "--consent", "record", "--admin")
    assert made.exit_code == 0, made.output
    named = parsed(made.output.splitlines()[-1])
    [key] = stored(config_file)
    assert named is not None
    assert named[0] == key.key_id
    assert key.accepts(named[1], 0.0)
    [line] = opd(config_file, "list").output.splitlines()
    assert all(word in line for word in (key.key_id, "consent=record", "admin", "ci"))
    assert named[1] not in line

    rotated = opd(config_file, "rotate", key.key_id, "--overlap", 24)
    assert "24 more hours" in rotated.output
    new = parsed(rotated.output.splitlines()[-1])
    assert new is not None
    [key] = stored(config_file)
    assert key.accepts(new[1], 0.0)
    assert key.accepts(named[1], 0.0)

    assert "within 2 s" in opd(config_file, "revoke", key.key_id).output
    assert "REVOKED" in opd(config_file, "list").output
    log = opd(config_file, "log").output.splitlines()
    assert [line.split()[1:3] for line in log] == [
        ["create", key.key_id],
        ["rotate", key.key_id],
        ["revoke", key.key_id],
    ]
    assert all("@" in line.split()[-1] for line in log)


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("rotate", ["000000000000"], "no API key '000000000000'"),
        ("revoke", ["000000000000"], "no API key '000000000000'"),
        ("create", ["--tenant", "two words"], "--tenant 'two words'"),
    ],
)
def test_bad_input_gets_one_line(
    config_file: Path, command: str, arguments: list[str], message: str
) -> None:
    result = opd(config_file, command, *arguments)
    assert result.exit_code == 2
    [line] = result.output.strip().splitlines()
    assert message in line


def test_an_open_door_is_refused_in_one_line(config_file: Path) -> None:
    result = CliRunner().invoke(
        app, ["proxy", "--run", str(config_file.parent), "--set", "proxy.host=0.0.0.0"]
    )
    assert result.exit_code == 2
    [line] = result.output.strip().splitlines()
    assert "there is no API key: create one with `opd keys create --run" in line


async def test_others_are_let_in_only_where_there_are_keys(config_file: Path) -> None:
    config = run_config.load(config_file)
    outside = run_config.load(config_file, ["proxy.host=0.0.0.0"])
    async with await Store.open(config.store) as store:
        await refuse_open_door(config, store, config_file)
        with pytest.raises(StartupError, match=r"no API key.*opd keys create --run"):
            await refuse_open_door(outside, store, config_file)
        await Keys(store, lambda: 0.0).create(actor="test")
        await refuse_open_door(outside, store, config_file)
