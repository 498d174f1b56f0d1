"""Shells complete the commands, and that loads nothing heavy."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.opd.cli.test_help_imports import HEAVY

CODE = """
import atexit, sys
heavy = sys.argv.pop(1).split()
atexit.register(lambda: print("loaded:", *sorted(set(heavy) & set(sys.modules))))
from opd.cli.app import app
app(prog_name="opd")
"""


def completed(words: str, position: int) -> list[str]:
    environment = {
        **os.environ,
        "_OPD_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(position),
    }
    done = subprocess.run(
        [sys.executable, "-c", CODE, HEAVY], env=environment, capture_output=True, text=True
    )
    return done.stdout.splitlines()


def test_commands_and_options_are_completed() -> None:
    assert completed("opd sta", 1) == ["status", "loaded:"]
    assert completed("opd hints ", 2) == ["list", "show", "delete", "loaded:"]
    assert "--watch" in completed("opd status --wa", 2)
