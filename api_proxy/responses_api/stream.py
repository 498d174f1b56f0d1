"""A streamed reply in the events of the Responses API. Pure.

    response.created, response.in_progress
    for each item: response.output_item.added, its parts and deltas, response.output_item.done
    response.completed, response.incomplete or response.failed

Every event has a sequence number; the items are those that an unstreamed response would have.
"""

from __future__ import annotations

from collections.abc import Collection
from io import StringIO
from typing import Any, Literal, TypeAlias

import orjson

from api_proxy.errors import ApiError
from api_proxy.reply.formats import EndedReply, Logprobs
from api_proxy.reply.reply import CallDelta, Delta
from api_proxy.responses_api.items import (
    Body,
    call_item,
    message_item,
    output_text,
    reasoning_item,
)
from api_proxy.responses_api.reply import Head, status_of, usage_body

Kind: TypeAlias = Literal["reasoning", "message", "function_call"]
_TEXT_EVENTS = {"reasoning": "response.reasoning_text", "message": "response.output_text"}
_PREFIXES = {"reasoning": "rs", "message": "msg"}


class _OpenItem:
    """An item that is being written."""

    def __init__(
        self,
        kind: Kind,
        item_id: str,
        call: CallDelta | None = None,
        namespaces: Collection[str] = (),
    ) -> None:
        self.kind: Kind = kind
        self.item_id = item_id
        self.call = call
        self._namespaces = namespaces
        self.written = StringIO()
        self.logprobs: list[Body] = []

    @property
    def text(self) -> str:
        """What has been written of it."""
        return self.written.getvalue()

    def begun(self) -> Body:
        """The item at its beginning."""
        empty = {} if self.kind == "function_call" else {"content": []}
        return {**self.ended(), **empty, "status": "in_progress"}

    def part(self) -> Body:
        """The one part of an item with text."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return output_text(self.text, self.logprobs)

    def ended(self) -> Body:
        """The item with what has been written."""
        if self.kind == "reasoning":
            return reasoning_item(self.item_id, self.text)
        if self.kind == "message":
            return message_item(self.item_id, self.part())
        assert self.call is not None
        name = self.call.name or ""
        return call_item(self.item_id, self.call.id or "", name, self.text, self._namespaces)


class ResponseStream:
    """The events of one reply."""

    keep_alive = b": keep-alive\n\n"

    def __init__(self, head: Head) -> None:
        self._head = head
        self._number = 0
        self._done: list[Body] = []
        self._open: _OpenItem | None = None

    def start(self) -> bytes:
        """The first events."""
        body = self._head.body("in_progress")
        return self._event("response.created", response=body) + self._event(
            "response.in_progress", response=body
        )

    def delta(self, delta: Delta, logprobs: Logprobs | None = None) -> bytes:
        """Text, reasoning or a piece of a call as it comes."""
        if delta.call is not None:
            return self._call_delta(delta.call)
        kind: Kind = "reasoning" if delta.reasoning else "message"
        begin = b""
        if self._open is None or self._open.kind != kind:
            begin = self._close("completed") + self._begin(_OpenItem(kind, self._item_id(kind)))
        assert self._open is not None
        text = delta.reasoning or delta.content
        self._open.written.write(text)
        fields: dict[str, Any] = {"delta": text}
        if kind == "message":
            self._open.logprobs += logprobs or []
            fields["logprobs"] = logprobs or []
        return begin + self._item_event(f"{_TEXT_EVENTS[kind]}.delta", content_index=0, **fields)

    def end(self, ended: EndedReply) -> bytes:
        """The last events."""
        status = status_of(ended.reason)
        last = self._close("incomplete" if ended.reply.has_open_call else status)
        usage = usage_body(ended.usage, ended.num_reasoning_tokens)
        body = self._head.body(status, self._done, usage)
        return last + self._event(f"response.{status}", response=body)

    def error(self, error: ApiError) -> bytes:
        """The failure that ends a stream, or is all of it."""
        begin = b"" if self._number else self.start()
        fault = {"code": error.code or "server_error", "message": error.message}
        body = self._head.body("failed", self._done, error=fault)
        return begin + self._event("response.failed", response=body)

    def _call_delta(self, piece: CallDelta) -> bytes:
        begin = b""
        if piece.id is not None:
            item_id = f"fc_{self._head.turn_id}_{piece.index}"
            begin = self._close("completed")
            begin += self._begin(_OpenItem("function_call", item_id, piece, self._head.namespaces))
        if not piece.arguments or self._open is None:
            return begin
        self._open.written.write(piece.arguments)
        kind = "response.function_call_arguments.delta"
        return begin + self._item_event(kind, delta=piece.arguments)

    def _item_id(self, kind: Kind) -> str:
        """As in an unstreamed response; items after the first of a kind get a number."""
        num_before = sum(item["type"] == kind for item in self._done)
        suffix = f"_{num_before}" if num_before else ""
        return f"{_PREFIXES[kind]}_{self._head.turn_id}{suffix}"

    def _begin(self, item: _OpenItem) -> bytes:
        self._open = item
        added = self._event(
            "response.output_item.added", output_index=len(self._done), item=item.begun()
        )
        if item.kind == "function_call":
            return added
        kind = "response.content_part.added"
        return added + self._item_event(kind, content_index=0, part=item.part())

    def _close(self, status: str) -> bytes:
        """End the open item."""
        item = self._open
        if item is None:
            return b""
        if item.kind == "function_call":
            kind = "response.function_call_arguments.done"
            events = self._item_event(kind, name=item.ended()["name"], arguments=item.text)
        else:
            fields: dict[str, Any] = {"content_index": 0, "text": item.text}
            if item.kind == "message":
                fields["logprobs"] = item.logprobs
            events = self._item_event(f"{_TEXT_EVENTS[item.kind]}.done", **fields)
            kind = "response.content_part.done"
            events += self._item_event(kind, content_index=0, part=item.part())
        whole = {**item.ended(), "status": status}
        index = len(self._done)
        events += self._event("response.output_item.done", output_index=index, item=whole)
        self._done.append(whole)
        self._open = None
        return events

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        assert self._open is not None
        item_id, index = self._open.item_id, len(self._done)
        return self._event(kind, item_id=item_id, output_index=index, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(body) + b"\n\n"
