"""Verifiers for the tests, as users write them."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any


def words(session: dict[str, Any]) -> tuple[float, str]:
    """By the last answer's text, which says what to answer."""
    print("users print")  # and their answer must not be mixed up with it
    text = session["messages"][-1]["content"]
    return (1.0, "it is polite") if "please" in text else (0.25, f"{len(session['tools'])} tools")


def number(session: dict[str, Any]) -> Any:
    """Whatever the last answer is, as Python."""
    return eval(session["messages"][-1]["content"])


def raises(session: dict[str, Any]) -> float:
    """It has a mistake."""
    raise KeyError(session["session_id"])


def hangs(session: dict[str, Any]) -> float:
    """It never comes back."""
    time.sleep(600)
    return 1.0


def starts_others(session: dict[str, Any]) -> float:
    """One that prints a lot, and one that goes on for long."""
    subprocess.run([sys.executable, "-c", "print('noise ' * 100_000)"], check=True)
    for leaves in (False, True):  # one that goes on where nobody finds it to end it, too
        waiting = [sys.executable, "-c", "import time; time.sleep(20)"]
        subprocess.Popen(waiting, start_new_session=leaves)
    return 0.5


def ends(session: dict[str, Any]) -> float:
    """It ends its process."""
    sys.exit(7)


NOT_A_FUNCTION = 3
