"""Reading JSON text that models and clients wrote: whatever is in it, the result is a value or
ValueError.

Python's own parser raises RecursionError if brackets nest too deep, at a depth that depends on the
caller. Here the depth is fixed, so that one text is the same message in every process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

MAX_NESTING = 200
"""The deepest nesting that is read. Well below Python's limit on recursion, because templates and
identities write the value as text again, within brackets of their own.
"""
_BRACKETS = re.compile(r'"(?:[^"\\]+|\\.?)*+(?:"|\Z)|[\[{\]}]', re.DOTALL)
"""Brackets and strings. An unclosed string extends to the end; otherwise each quote in it would
start another search for its end.
"""


def parse_json(text: str, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """The value of `text`, as json.loads reads it. Raises ValueError on text that is not JSON, and
    on brackets nested deeper than MAX_NESTING, closed or not.
    """
    if nests_too_deep(text):
        raise ValueError(f"the JSON text nests deeper than {MAX_NESTING}")
    return json.loads(text, parse_constant=parse_constant)


def nests_too_deep(text: str) -> bool:
    """Whether brackets outside strings nest deeper than MAX_NESTING anywhere in `text`."""
    if text.count("[") + text.count("{") <= MAX_NESTING:
        return False
    depth = 0
    for found in _BRACKETS.finditer(text):
        bracket = found.group()
        if bracket in "[{":
            depth += 1
            if depth > MAX_NESTING:
                return True
        elif bracket in "]}":
            depth -= 1
    return False
