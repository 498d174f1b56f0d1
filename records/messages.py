"""OpenAI chat messages as this project stores and compares them.

Messages are plain dicts in OpenAI's shape. This module holds the pure functions on them: their
text, their canonical form (the identity of a node in the conversation tree) and their fingerprint
(the weaker identity by which a request is linked to an earlier turn when an agent re-serialised
its history). It does not know tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, TypeAlias

from records.json_text import parse_json

Message: TypeAlias = dict[str, Any]


def content_text(content: Any) -> str:
    """The text of a message's content: a string as it is, text parts joined by a space, null as "".

    Parts that are not text are left out (ALGORITHMS 1.6).
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        texts = [
            part if isinstance(part, str) else str(part.get("text", ""))
            for part in content
            if isinstance(part, str) or part.get("type") in ("text", "input_text", "output_text")
        ]
        return " ".join(texts)
    raise ValueError(
        f"message content must be a string, a list of parts or null, got {type(content).__name__}"
    )


def parsed_arguments(arguments: Any) -> Any:
    """A tool call's arguments as a value: JSON text parsed where it parses, else left as it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return parse_json(arguments)
    except ValueError:
        return arguments


def canonical_message(message: Message) -> dict[str, Any]:
    """What two messages must share to be the same message of a conversation.

    Text is stripped, `null` content is "", tool calls are reduced to id, name and parsed arguments.
    Reasoning is left out: agents drop it from the history that they send back.
    """
    canonical: dict[str, Any] = {
        "role": message["role"],
        "content": content_text(message.get("content")).strip(),
    }
    if message.get("tool_calls"):
        canonical["tool_calls"] = [
            {
                "id": call.get("id"),
                "name": call["function"]["name"],
                "arguments": parsed_arguments(call["function"].get("arguments")),
            }
            for call in message["tool_calls"]
        ]
    if message.get("tool_call_id"):
        canonical["tool_call_id"] = message["tool_call_id"]
    return canonical


def fingerprint(message: Message) -> str:
    """Hex SHA-256 of the canonical message, without its place in a conversation."""
    return _digest(canonical_message(message))


def node_id(parent_id: str, message: Message) -> str:
    """Identity of `message` as a child of the node `parent_id` in the conversation tree."""
    return _digest([parent_id, canonical_message(message)])


def path_ids(root: str, messages: Sequence[Message]) -> list[str]:
    """Node ids of every prefix of `messages`: element i identifies messages[: i + 1].

    `root` scopes the tree: the same messages under another root are other nodes.
    """
    ids = []
    parent = root
    for message in messages:
        parent = node_id(parent, message)
        ids.append(parent)
    return ids


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
