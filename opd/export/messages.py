"""Messages as other programs' data sets contain them: OpenAI's shape with text content, nothing
else.

A message that does not fit (an image, a call of a tool that is not a function) is refused, not
shortened: the answer may be about what would be left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from records.messages import Message, content_text
from records.tables.columns import dump_json

_TEXT_PARTS = ("text", "input_text", "output_text")


class NotText(ValueError):
    """A message contains more than text and function calls."""


def plain_messages(messages: Sequence[Message]) -> list[Message]:
    """The messages with the fields role, content, reasoning_content, tool_calls, tool_call_id and
    name, if they have them; arguments are JSON text. Raises NotText.
    """
    return [_plain(message) for message in messages]


def _plain(message: Message) -> Message:
    plain: Message = {"role": message["role"], "content": _content(message.get("content"))}
    for field in ("reasoning_content", "tool_call_id", "name"):
        if isinstance(message.get(field), str):
            plain[field] = message[field]
    if message.get("tool_calls"):
        plain["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return plain


def _content(content: Any) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if all(isinstance(part, str) or part.get("type") in _TEXT_PARTS for part in content):
        return content_text(content)
    raise NotText("a part of a message is not text")


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        raise NotText("a call is not of a function")
    arguments = function.get("arguments")
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {
            "name": function["name"],
            "arguments": arguments if isinstance(arguments, str) else dump_json(arguments or {}),
        },
    }
