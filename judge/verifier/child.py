"""One call of a user's function in a process of its own, which may be killed at any time.

    python -m judge.verifier.child module:function            the session comes by standard input
    python -m judge.verifier.child module:function --check    the function is found, nothing else

The session is one line of JSON. Standard input stays open as long as somebody waits for the answer:
when it closes, this process ends. Standard output holds the answer alone, as JSON: {"outcome": ...,
"reason": ...}; what the function prints, and what processes that it starts print, goes to standard
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
    """Call the function that the arguments name; 2 where it cannot be found."""
    name, *rest = sys.argv[1:]
    # Of the descriptors, since a process that the function starts prints past Python.
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
    """The function. Raises whatever its module raises, and TypeError for what is none."""
    module, _, attribute = name.partition(":")
    function = getattr(importlib.import_module(module), attribute)
    if not callable(function):
        raise TypeError(f"{name} is no function")
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
    """A number as JSON knows it, those of other libraries too; None for what is none."""
    if isinstance(value, str):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


if __name__ == "__main__":
    sys.exit(main())
