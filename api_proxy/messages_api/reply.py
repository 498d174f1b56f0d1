"""A reply in Anthropic's format: content blocks, stop reason, usage, a whole message. Pure."""

from __future__ import annotations

import json
from typing import Any

import orjson

from api_proxy.messages_api.request import UNPARSED_ARGUMENTS
from api_proxy.reply.formats import EndedReply
from api_proxy.reply.reply import Reply, SentCall


def message_body(turn_id: str, model: str, ended: EndedReply) -> dict[str, Any]:
    """A whole message."""
    return {
        **open_message(turn_id, model),
        "content": content_blocks(turn_id, ended.reply),
        **stop_fields(ended),
        "usage": usage_body(ended),
    }


def open_message(turn_id: str, model: str) -> dict[str, Any]:
    """A message without content yet."""
    return {
        "id": f"msg_{turn_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def content_blocks(turn_id: str, reply: Reply) -> list[dict[str, Any]]:
    """Thinking, text, tool calls: in the order in which a policy writes them."""
    blocks: list[dict[str, Any]] = []
    if reply.reasoning:
        blocks.append(thinking_block(reply.reasoning, turn_id))
    if reply.content:
        blocks.append({"type": "text", "text": reply.content})
    return blocks + [tool_use_block(call, call_input(call)) for call in reply.tool_calls]


def thinking_block(text: str, signature: str) -> dict[str, Any]:
    """A thinking block. Nothing needs to be signed here, but clients only keep signed blocks, so
    the signature names the turn.
    """
    return {"type": "thinking", "thinking": text, "signature": signature}


def tool_use_block(call: SentCall, value: dict[str, Any]) -> dict[str, Any]:
    """A tool call with this input."""
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": value}


def call_input(call: SentCall) -> dict[str, Any]:
    """A call's arguments as an object; text that is not one is put into an object of its own."""
    value = _object(call.arguments)
    return {UNPARSED_ARGUMENTS: call.arguments} if value is None else value


def input_json(call: SentCall) -> str:
    """`call_input` as text: the policy's own if that is an object."""
    if _object(call.arguments) is not None:
        return call.arguments
    return json.dumps({UNPARSED_ARGUMENTS: call.arguments}, ensure_ascii=False)


def _object(text: str) -> dict[str, Any] | None:
    """The JSON object in `text`; None if there is none, or none that can be written again."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        orjson.dumps({"content": [{"input": value}]})
    except (ValueError, TypeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON, although Python reads it")


def stop_fields(ended: EndedReply) -> dict[str, str | None]:
    """Why the reply ended."""
    if ended.reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if ended.reply.calls_tools:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if ended.matched_stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": ended.matched_stop}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def usage_body(ended: EndedReply) -> dict[str, Any]:
    """Token counts; `input_tokens` are those that were not cached. What the engine wrote to its
    cache is not known.
    """
    usage = ended.usage
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": None,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": ended.num_reasoning_tokens},
    }
