"""The user's canaries: one JSON object per line, read and checked before anything starts.

    {"name": "one-word", "prompt": "Who wrote Faust? One word.", "matches": "^\\\\S+$"}

Instead of `prompt` there may be `messages`, and `tools` too. What the answer must be is one of
`contains` (a text), `matches` (a regular expression, searched for), `function` ("module:name",
which gets the answer's text and returns whether it is right) and `follows` (words; the judge
decides whether the answer does what they ask).
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from records.messages import Message
from trainer.errors import StartupError

MOST = 1000
"""Most canaries in a file."""
_WAYS = ("contains", "matches", "function", "follows")

Function = Callable[[str], bool]


class Canary(BaseModel):
    """A request, and what its answer must be."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    prompt: str | None = None
    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] = []
    contains: str | None = None
    matches: str | None = None
    function: str | None = None
    follows: str | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Canary:
        if (self.prompt is None) == (not self.messages):
            raise ValueError("give 'prompt' or 'messages', and not both")
        if any(not isinstance(one.get("role"), str) for one in self.messages):
            raise ValueError("each of 'messages' needs a 'role'")
        given = [name for name in _WAYS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of {', '.join(_WAYS)}")
        if self.matches is not None:
            import regex  # only where there are such canaries: every process reads settings

            try:
                regex.compile(self.matches)
            except regex.error as error:
                raise ValueError(f"'matches' is not a regular expression: {error}") from None
        if self.function is not None:
            load_function(self.function)
        return self

    @property
    def conversation(self) -> list[Message]:
        """What the policy is asked."""
        if self.prompt is not None:
            return [{"role": "user", "content": self.prompt}]
        return self.messages


def load_function(path: str) -> Function:
    """The function at "module:name". Raises ValueError."""
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"'function' {path!r} cannot be imported: {error}") from None
    if not callable(found):
        raise ValueError(f"'function' {path!r} is not a function")
    return cast(Function, found)


def read_canaries(path: Path) -> list[Canary]:
    """The file's canaries. Raises StartupError, which names file, line and what is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"guard.canaries: {path} cannot be read: {error}") from None
    found: list[Canary] = []
    names: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            canary = Canary.model_validate(json.loads(line))
        except ValidationError as error:
            [first, *_] = error.errors()
            where = ".".join(str(part) for part in first["loc"])
            what = first["msg"].removeprefix("Value error, ")
            raise StartupError(
                f"{path}, line {number}: {f'{where}: ' if where else ''}{what}"
            ) from None
        except ValueError as error:
            raise StartupError(f"{path}, line {number}: not a JSON object: {error}") from None
        if canary.name in names:
            raise StartupError(f"{path}, line {number}: a second canary {canary.name!r}")
        names.add(canary.name)
        found.append(canary)
    if not found:
        raise StartupError(f"{path}: it contains no canary")
    if len(found) > MOST:
        raise StartupError(f"{path}: {len(found)} canaries; at most {MOST}")
    return found
