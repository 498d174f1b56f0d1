"""A streamed reply in Anthropic's events. Pure.

    message_start
    for each block: content_block_start, content_block_delta..., content_block_stop
    message_delta (stop reason, usage), message_stop; or error

A tool call is sent when it is complete: its input must be an object, which is known only then.
"""

from __future__ import annotations

from io import StringIO
from typing import Any

import orjson

from api_proxy.errors import ApiError
from api_proxy.messages_api.errors import refusal
from api_proxy.messages_api.reply import (
    input_json,
    open_message,
    stop_fields,
    thinking_block,
    tool_use_block,
    usage_body,
)
from api_proxy.reply.formats import EndedReply, Logprobs
from api_proxy.reply.reply import CallDelta, Delta, SentCall


class MessageStream:
    """The events of one reply; `num_prompt_tokens` is what `message_start` reports."""

    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, turn_id: str, model: str, num_prompt_tokens: int) -> None:
        self._turn_id = turn_id
        self._model = model
        self._num_prompt_tokens = num_prompt_tokens
        self._index = 0
        self._open: str | None = None
        self._call: CallDelta | None = None
        self._arguments = StringIO()

    def start(self) -> bytes:
        """The first event. The number of cached tokens is known only at the end."""
        usage = {"input_tokens": self._num_prompt_tokens, "output_tokens": 0}
        message = {**open_message(self._turn_id, self._model), "usage": usage}
        return _event("message_start", message=message)

    def delta(self, delta: Delta, logprobs: Logprobs | None = None) -> bytes:
        """Text or thinking as it comes; a tool call once the next part of the reply begins."""
        if delta.call is not None:
            return self._take_call(delta.call)
        kind, field = ("thinking", "thinking") if delta.reasoning else ("text", "text")
        begin = b""
        if self._open != kind:
            begin = self._close() + self._begin(_empty_block(kind))
            self._open = kind
        change = {"type": f"{kind}_delta", field: delta.reasoning or delta.content}
        return begin + self._block_event("content_block_delta", delta=change)

    def end(self, ended: EndedReply) -> bytes:
        """The last events."""
        return (
            self._close()
            + _event("message_delta", delta=stop_fields(ended), usage=usage_body(ended))
            + _event("message_stop")
        )

    def error(self, error: ApiError) -> bytes:
        """The error that ends a stream."""
        _, body = refusal(error)
        return _event("error", error=body["error"])

    def _take_call(self, piece: CallDelta) -> bytes:
        """A new call, or more arguments of the one that is being written."""
        before = b""
        if self._call is None or piece.id is not None:
            before = self._close()
            self._call, self._arguments = piece, StringIO()
        self._arguments.write(piece.arguments)
        return before

    def _close(self) -> bytes:
        """End the open block, or send the call that is now complete."""
        if self._call is not None:
            arguments = self._arguments.getvalue()
            call = SentCall(id=self._call.id or "", name=self._call.name or "", arguments=arguments)
            self._call = None
            change = {"type": "input_json_delta", "partial_json": input_json(call)}
            block = self._begin(tool_use_block(call, {}))
            return block + self._block_event("content_block_delta", delta=change) + self._stop()
        if self._open is None:
            return b""
        sign = b""
        if self._open == "thinking":
            change = {"type": "signature_delta", "signature": self._turn_id}
            sign = self._block_event("content_block_delta", delta=change)
        return sign + self._stop()

    def _begin(self, block: dict[str, Any]) -> bytes:
        return self._block_event("content_block_start", content_block=block)

    def _stop(self) -> bytes:
        event = self._block_event("content_block_stop")
        self._open = None
        self._index += 1
        return event

    def _block_event(self, kind: str, **fields: Any) -> bytes:
        return _event(kind, index=self._index, **fields)


def _empty_block(kind: str) -> dict[str, Any]:
    return thinking_block("", "") if kind == "thinking" else {"type": "text", "text": ""}


def _event(kind: str, **fields: Any) -> bytes:
    return (
        b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **fields}) + b"\n\n"
    )
