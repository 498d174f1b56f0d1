"""OpenAI messages as chat templates expect them.

Agents send the same conversation in many shapes: content as parts, null content with tool calls,
arguments as JSON text or as objects, `developer` for `system`, keys that no template knows. Here
they get one shape, so that the rendered text depends on what was said and not on the client
library. Pure functions; tokens and templates are handled by `rendering`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from records.json_text import parse_json
from records.messages import Message, content_text

ROLES = ("system", "developer", "user", "assistant", "tool")


def template_messages(messages: Sequence[Message]) -> list[Message]:
    """New messages with string content, decoded arguments and only the keys that templates read.

    Content parts are joined into one text by `records.messages.content_text` (like the hinted
    prompt, ALGORITHMS 1.6); `developer` becomes `system`; arguments that are the JSON text of an
    object become that object, which is what inference servers pass to a template; other arguments
    stay text. Raises ValueError for a role that no template knows.
    """
    return [_template_message(message) for message in messages]


def _template_message(message: Message) -> Message:
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"unknown message role {role!r}; known: {', '.join(ROLES)}")
    shaped: Message = {
        "role": "system" if role == "developer" else role,
        "content": content_text(message.get("content")),
    }
    for key in ("name", "tool_call_id"):
        if message.get(key) is not None:
            shaped[key] = message[key]
    if role == "assistant":
        reasoning = message.get("reasoning_content", message.get("reasoning"))
        if isinstance(reasoning, str):
            shaped["reasoning_content"] = reasoning
        if message.get("tool_calls"):
            shaped["tool_calls"] = [_template_call(call) for call in message["tool_calls"]]
    return shaped


def _template_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    shaped = {
        "type": "function",
        "function": {
            "name": function["name"],
            "arguments": template_arguments(function.get("arguments")),
        },
    }
    if call.get("id") is not None:
        shaped["id"] = call["id"]
    return shaped


def template_arguments(arguments: Any) -> Any:
    """A call's arguments for a template: an object if they are one, else the text as it is.

    Missing or empty arguments are an empty object.
    """
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        value = parse_json(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments
