"""Turns input items into messages, and messages into items. Pure.

One reply is several items (reasoning, message, function calls), and one message of the conversation
tree. The items that this endpoint sends carry their turn's id in their own, so they are put
together again wherever they are; those without ids, as long as they are in the order of a reply.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeAlias

from api_proxy.responses_api.schemas import (
    FunctionCall,
    FunctionCallOutput,
    MessageItem,
    ReasoningItem,
    RefusalPart,
    TextPart,
)
from api_proxy.responses_api.tools import full_name, split_name
from records.messages import Message, content_text

AnyItem: TypeAlias = MessageItem | FunctionCall | FunctionCallOutput | ReasoningItem
ReplyItem: TypeAlias = MessageItem | FunctionCall | ReasoningItem
Body: TypeAlias = dict[str, Any]

_OWN_ID = re.compile(r"(?:rs|msg|fc)_([0-9a-f]{32})(?:_\d+)?")
_RANKS = {"reasoning": 0, "message": 1, "function_call": 2}
"""The order of a reply's items."""


def turn_of_item(item_id: str | None) -> str | None:
    """The turn that an item of ours belongs to, by its id."""
    match = _OWN_ID.fullmatch(item_id or "")
    return match[1] if match else None


def messages_of(items: Iterable[AnyItem]) -> list[Message]:
    """The messages that the items stand for."""
    gathered = _Gathered()
    for item in items:
        if isinstance(item, FunctionCallOutput):
            content = _content(item.output)
            gathered.add({"role": "tool", "tool_call_id": item.call_id, "content": content})
        elif isinstance(item, MessageItem) and item.role != "assistant":
            gathered.add({"role": item.role, "content": _content(item.content)})
        else:
            gathered.add_reply_item(item)
    return gathered.finish()


class _Reply:
    """One reply in the making: pieces are put together once, however many there are."""

    def __init__(self) -> None:
        self.message: Message = {"role": "assistant", "content": ""}
        self._texts: list[str] = []
        self._thoughts: list[str] = []

    def add(self, item: ReplyItem) -> None:
        """One more item of it."""
        if isinstance(item, FunctionCall):
            name = full_name(item.namespace, item.name)
            function = {"name": name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            self.message.setdefault("tool_calls", []).append(call)
        elif isinstance(item, MessageItem):
            # A reply's text may have been cut into several messages by the calls in between.
            self._texts += [part.text for part in item.content]
        elif item.content:
            text = "\n".join(part.text for part in item.content)
            if self._thoughts == [""]:
                self._thoughts.clear()
            self._thoughts.append(text)

    def finish(self) -> None:
        """Fill in the texts."""
        no_text = None if self.message.get("tool_calls") else ""
        self.message["content"] = "".join(self._texts) or no_text
        if self._thoughts:
            self.message["reasoning_content"] = "\n".join(self._thoughts)


class _Gathered:
    """Messages so far, and the replies among them that may get more items."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._replies: list[_Reply] = []
        self._open: _Reply | None = None
        self._open_turn: str | None = None
        self._rank = 0
        self._by_turn: dict[str, _Reply] = {}

    def finish(self) -> list[Message]:
        """The messages, once all items are there."""
        for reply in self._replies:
            reply.finish()
        return self._messages

    def add(self, message: Message) -> None:
        """Add a message that is not a reply; it ends the reply before it."""
        self._messages.append(message)
        self._open = None

    def add_reply_item(self, item: ReplyItem) -> None:
        """Add an item to the reply that it belongs to."""
        turn_id, rank = turn_of_item(item.id), _RANKS[item.type]
        reply = self._by_turn.get(turn_id) if turn_id else None
        if reply is None and self._open is not None and self._goes_on(turn_id, rank):
            reply = self._open
        if reply is None:
            reply = _Reply()
            self._replies.append(reply)
            self._messages.append(reply.message)
            self._open_turn = None
        if turn_id is not None:
            self._by_turn[turn_id] = reply
            self._open_turn = turn_id
        self._open, self._rank = reply, rank
        reply.add(item)

    def _goes_on(self, turn_id: str | None, rank: int) -> bool:
        """Whether an item belongs to the open reply, by its place."""
        if turn_id is not None and self._open_turn is not None:
            return turn_id == self._open_turn
        # A second text belongs to another reply; reasoning and calls may come in several items.
        return rank > self._rank or (rank == self._rank and rank != _RANKS["message"])


def _content(parts: Sequence[TextPart | RefusalPart]) -> str | list[dict[str, str]]:
    """One text as a string, several as separate parts."""
    if len(parts) <= 1:
        return parts[0].text if parts else ""
    return [{"type": "text", "text": part.text} for part in parts]


def reply_items(
    turn_id: str, message: Message, status: str, namespaces: Collection[str] = ()
) -> list[Body]:
    """The items of a reply, as they are sent; the last one has `status`, the others are complete.

    `message` is the assistant's message of the turn, `namespaces` are those of its tools.
    """
    items: list[Body] = []
    if message.get("reasoning_content"):
        items.append(reasoning_item(f"rs_{turn_id}", message["reasoning_content"]))
    if text := content_text(message.get("content")):
        items.append(message_item(f"msg_{turn_id}", output_text(text)))
    for index, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        item_id = f"fc_{turn_id}_{index}"
        name, arguments = function["name"], function["arguments"]
        items.append(call_item(item_id, call["id"], name, arguments, namespaces))
    return [*items[:-1], {**items[-1], "status": status}] if items else []


def reasoning_item(item_id: str, text: str) -> Body:
    """Reasoning in the clear; there is no summary of it."""
    content = [{"type": "reasoning_text", "text": text}]
    return {
        "id": item_id,
        "type": "reasoning",
        "summary": [],
        "content": content,
        "status": "completed",
    }


def message_item(item_id: str, *parts: Body) -> Body:
    """A message of the assistant."""
    return {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": list(parts),
    }


def output_text(text: str, logprobs: list[Body] | None = None) -> Body:
    """The text of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def call_item(
    item_id: str, call_id: str, name: str, arguments: str, namespaces: Collection[str]
) -> Body:
    """A call of the function that the model calls `name`."""
    namespace, name = split_name(name, namespaces)
    item = {
        "id": item_id,
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": "completed",
    }
    return item if namespace is None else {**item, "namespace": namespace}


def input_items(
    turn_id: str, messages: Sequence[Message], namespaces: Collection[str] = ()
) -> list[Body]:
    """The messages before a reply as items, with unique ids."""
    items: list[Body] = []
    for message in messages:
        if message["role"] == "assistant":
            items += reply_items("", message, "completed", namespaces)
        elif message["role"] == "tool":
            output = content_text(message.get("content"))
            call_id = message.get("tool_call_id")
            items.append({"type": "function_call_output", "call_id": call_id, "output": output})
        else:
            items.append({"type": "message", "role": message["role"], "content": _inputs(message)})
    return [
        {**item, "id": f"item_{turn_id}_{index}", "status": "completed"}
        for index, item in enumerate(items)
    ]


def _inputs(message: Message) -> list[Body]:
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    return [{"type": "input_text", "text": content_text([part] if part else "")} for part in parts]
