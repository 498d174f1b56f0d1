"""The content of a reply's ids, and what the client gets of an attempted tool call.

Pure; a call comes as parsed by the package `renderers`, with the text of its block.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from records.json_text import parse_json
from rollout_bridge.rendering.call_text import read_call

_NAMED_CALL = re.compile(
    r'\s*\{\s*"name"\s*:\s*"(?P<name>[^"\\]+)"\s*(?:,\s*"arguments"\s*:\s*(?P<arguments>.*))?',
    re.DOTALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCall:
    """One block that the policy meant as a tool call.

    `arguments_json` goes to the client unchanged: as it was sampled, if the family writes JSON.
    `ok`: there is a name and the arguments are a JSON object; otherwise `arguments_json` is the
    text found in their place and `name` is what could be read, "" if nothing. `raw` is the block's
    decoded text, markers included: what to show as content when there is no name to call.
    `open_at`: the block has no end yet, and its text begins at this id.
    """

    name: str
    arguments_json: str
    ok: bool
    raw: str
    open_at: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedReply:
    """The content of a reply: text without markers, reasoning (None: there was none), calls."""

    content: str
    reasoning: str | None
    tool_calls: list[ParsedCall]


def name_and_arguments(call: Any) -> tuple[str, str, bool]:
    """Name ("" if there is none), arguments for the client, and whether these are a JSON object."""
    written = read_call(call.raw)
    if written is not None:
        return *written, is_object(written[1])
    if call.name:
        return call.name, *_arguments_json(call.arguments)
    named = _NAMED_CALL.match(call.raw)
    if named is None:
        return "", call.raw, False
    # The block's own closing brace is not part of the arguments; a template writes it again.
    return named["name"], (named["arguments"] or "").rstrip().removesuffix("}"), False


def _arguments_json(arguments: Any) -> tuple[str, bool]:
    """A parsed call's arguments as text for the client, and whether they are a JSON object."""
    if isinstance(arguments, str):
        return arguments, is_object(arguments)
    text = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
    return text, is_object(text)


def is_object(text: str) -> bool:
    """Whether `text` is a JSON object; Infinity and NaN, which Python reads, are not JSON."""
    try:
        return isinstance(parse_json(text, _refuse_constant), dict)
    except ValueError:
        return False


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
