"""OpenAI chat messages as this project stores and compares them.

Messages are plain dicts in OpenAI's shape. This module holds the pure functions on them: their
text, their canonical form (the identity of a node in the conversation tree) and their fingerprint
(the weaker identity by which a request is linked to an earlier turn when an agent re-serialised its
history), and what a client changed in an answer before it sent it back. It knows no tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

from records.json_text import parse_json

_CANONICAL = json.JSONEncoder(
    sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str
)

Message: TypeAlias = dict[str, Any]
EchoChange: TypeAlias = Literal["text", "calls", "ids", "retold"]
"""What a client changed in an answer with calls: the text next to them, their number (some are left
out), their ids; or it retells the calls as text.
"""


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
    """A tool call's arguments as a value: JSON text is parsed if it parses, otherwise left as it
    is.
    """
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


def calls_key(message: Message) -> str | None:
    """A key that calls with equal names and arguments share, whatever their ids; None without
    calls.
    """
    calls = canonical_message(message).get("tool_calls")
    return _digest([_without_id(call) for call in calls]) if calls else None


def loose_fingerprint(message: Message) -> str:
    """A fingerprint that ignores what clients rewrite: ids of calls, the text next to them."""
    canonical = canonical_message(message)
    canonical.pop("tool_call_id", None)
    if "tool_calls" in canonical:
        canonical["content"] = ""
        canonical["tool_calls"] = [_without_id(call) for call in canonical["tool_calls"]]
    return _digest(canonical)


def echo_changes(sent: Message, shown: Message) -> tuple[EchoChange, ...] | None:
    """What `shown`, which a client sends back, changes in the answer `sent`.

    None if it is not that answer: it has no calls, or one that was not sent. A call is the same by
    name and arguments; ids may have been renamed, and calls left out.
    """
    before, after = canonical_message(sent), canonical_message(shown)
    known = before.get("tool_calls", ())
    left: dict[str, _EqualCalls] = defaultdict(_EqualCalls)
    for call in known:
        left[_call_digest(call)].add(_digest(call["id"]))
    calls = after.get("tool_calls", ())
    changes: list[EchoChange] = []
    for call in calls:
        same = left.get(_call_digest(call))
        if not same:
            return None
        if not same.take(_digest(call["id"])) and "ids" not in changes:
            changes.append("ids")
    if not calls:
        return None
    if len(calls) < len(known):
        changes.append("calls")
    if before["content"] != after["content"]:
        changes.append("text")
    return tuple(changes)


def echo_changes_of(text: str | None) -> tuple[EchoChange, ...]:
    """The changes from their stored form, separated by commas; None: there are none."""
    given = text.split(",") if text else []
    return tuple(one for one in get_args(EchoChange) if one in given)


class _EqualCalls:
    """Calls with one name and equal arguments that were sent and not yet shown, by their ids."""

    def __init__(self) -> None:
        self._ids: OrderedDict[int, str] = OrderedDict()
        self._places: dict[str, deque[int]] = defaultdict(deque)

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, call_id: str) -> None:
        """Add a call after the others."""
        place = len(self._ids)
        self._ids[place] = call_id
        self._places[call_id].append(place)

    def take(self, call_id: str) -> bool:
        """Take out the call with this id; False if there is none: the first was taken instead."""
        places = self._places.get(call_id)
        if places:
            del self._ids[places.popleft()]
            return True
        _, other = self._ids.popitem(last=False)
        self._places[other].popleft()
        return False


def _without_id(call: dict[str, Any]) -> list[Any]:
    return [call["name"], call["arguments"]]


def _call_digest(call: dict[str, Any]) -> str:
    """Equal for calls with equal names and arguments; 1, 1.0 and true are equal, as in Python."""
    return _digest([call["name"], _plain_numbers(call["arguments"])])


def _plain_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain_numbers(item) for item in value]
    if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    return value


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
    return hashlib.sha256(_CANONICAL.encode(value).encode("utf-8", "surrogatepass")).hexdigest()
