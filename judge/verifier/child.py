"""One call of a user's function in a process of its own, which may be killed at any time.

    python -m judge.verifier.child module:function            the session comes by standard input
    python -m judge.verifier.child module:function --check    the function is found, nothing else

What the function prints goes to standard error; standard output holds its answer alone, as JSON:
{"outcome": ..., "reason": ...}.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Callable
from typing import Any


def main() -> int:
    """Call the function that the arguments name; 2 where it cannot be found."""
    name, *rest = sys.argv[1:]
    with contextlib.redirect_stdout(sys.stderr):
        try:
            function = found(name)
        except Exception as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return 2
        if rest:
            return 0
        answer = as_answer(function(json.load(sys.stdin)))
    json.dump(answer, sys.stdout)
    return 0


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
        return {"outcome": value.get("outcome"), "reason": value.get("reason")}
    if isinstance(value, tuple | list) and len(value) == 2:
        return {"outcome": value[0], "reason": value[1]}
    return {"outcome": value, "reason": None}


if __name__ == "__main__":
    sys.exit(main())
