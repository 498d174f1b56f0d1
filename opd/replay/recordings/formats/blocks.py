"""Content blocks of session logs as OpenAI messages: what Claude Code and pi have in common.

A response is blocks of text, thinking and tool calls; texts are joined by line breaks, and so are
thoughts. Blocks of other kinds stay as parts, which the checks of messages report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

THINKING = ("thinking", "reasoning")
HIDDEN = ("redacted_thinking",)
"""Blocks that contain nothing to read."""


def text_of(blocks: Any) -> Any:
    """What user messages and tool results say: text as it is, a single text block as its text."""
    if not isinstance(blocks, list) or len(blocks) != 1:
        return blocks
    block = blocks[0]
    is_text = isinstance(block, dict) and block.get("type") == "text"
    return block.get("text") if is_text and isinstance(block.get("text"), str) else blocks


def response_of(blocks: Any, call_names: Mapping[str, str]) -> dict[str, Any]:
    """The assistant message that `blocks` form. `call_names` maps each type that a block of a tool
    call may have to the name of the field that contains its arguments.
    """
    message: dict[str, Any] = {"role": "assistant"}
    if not isinstance(blocks, list):
        return {**message, "content": blocks}
    texts: list[str] = []
    others: list[Any] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif kind in THINKING and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif isinstance(kind, str) and kind in call_names:
            calls.append(_call(block, call_names[kind]))
        elif kind not in HIDDEN:
            others.append(block)
    text = _joined(texts)
    message["content"] = [{"type": "text", "text": text}, *others] if others else text
    if _joined(thoughts):
        message["reasoning_content"] = _joined(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Mapping[str, Any], arguments: str) -> dict[str, Any]:
    function = {"name": block.get("name"), "arguments": block.get(arguments)}
    return {"id": block.get("id"), "type": "function", "function": function}


def _joined(texts: Iterable[str]) -> str:
    return "\n".join(text for text in texts if text.strip())
