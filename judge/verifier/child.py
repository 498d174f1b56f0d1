"""One call of a user's function in a process of its own, which may be killed at any time.

    python -m judge.verifier.child module:function            the session comes on standard input
    python -m judge.verifier.child module:function --check    only look for the function

The session is one line of JSON. Standard input stays open as long as somebody waits for the answer:
when it closes, this process ends. Standard output contains only the answer, as JSON: {"outcome":
..., "reason": ...}; whatever the function and the processes that it starts print goes to standard
error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any


def main() -> int:
    """Call the function that the arguments name; returns 2 if it cannot be found."""
    name, *rest = sys.argv[1:]
    # Redirect the descriptors, because processes that the function starts do not print through
    # Python.
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        function = found(name)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    if rest:
        return 0
    session = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_when_nobody_waits, daemon=True).start()
    answer = json.dumps(as_answer(function(session)))
    with os.fdopen(answers, "w") as out:
        out.write(answer)
    return 0


def _end_when_nobody_waits() -> None:
    sys.stdin.read()
    os._exit(1)


def found(name: str) -> Callable[[dict[str, Any]], Any]:
    """The function. Raises whatever its module raises, and TypeError if it is not callable."""
    module, _, attribute = name.partition(":")
    function = getattr(importlib.import_module(module), attribute)
    if not callable(function):
        raise TypeError(f"{name} is not a function")
    return function


def as_answer(value: Any) -> dict[str, Any]:
    """What the function returned: a number, a number and a reason, or a mapping of both."""
    if isinstance(value, dict):
        outcome, reason = value.get("outcome"), value.get("reason")
    elif isinstance(value, tuple | list) and len(value) == 2:
        outcome, reason = value
    else:
        outcome, reason = value, None
    return {"outcome": _plain(outcome), "reason": None if reason is None else str(reason)}


def _plain(value: Any) -> float | None:
    """A number that JSON can express, also from other libraries' types; None for anything else."""
    if isinstance(value, str):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


if __name__ == "__main__":
    sys.exit(main())
