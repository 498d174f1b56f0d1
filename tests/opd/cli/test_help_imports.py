"""`opd --help` answers at once: it loads nothing that only the commands' work needs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from opd.cli.app import app

HEAVY = "torch transformers peft sqlalchemy numpy openai httpx fastapi aiohttp matplotlib"
SHOW = """
import sys
from typer.testing import CliRunner
from opd.cli.app import app
shown = CliRunner().invoke(app, sys.argv[2:])
assert shown.exit_code == 0, shown.output
print(*sorted(set(sys.argv[1].split()) & set(sys.modules)))
"""


@pytest.mark.parametrize(
    "arguments", ["--help", "serve --help", "replay run --help", "records export --help"]
)
def test_help_loads_nothing_heavy(arguments: str) -> None:
    shown = subprocess.run(
        [sys.executable, "-c", SHOW, HEAVY, *arguments.split()],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.split() == []


def test_the_list_of_commands_does_without_settings() -> None:
    """typer itself loads pydantic for the options of a command, and not for the list of them."""
    code = "import sys, opd.cli.app; print('pydantic' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


def commands(group: TyperGroup, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words that call each command below a group."""
    for word, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from commands(command, (*words, word))
        else:
            yield (*words, word)


def test_help_shows_words_and_no_types_of_python() -> None:
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    found = list(commands(group))
    assert len(found) > 20
    for words in found:
        result = CliRunner().invoke(app, [*words, "--help"])
        assert result.exit_code == 0, words
        assert not re.search(r"<bool>|<list\[str|\[ARGS\]| \.(?:\s|$)", result.output), words
