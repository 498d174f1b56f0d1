"""Turns what a recording gives as a chat message into one that can be kept, and finds its faults.

A faulty message is kept too, as far as possible, because it is context for others; the caller marks
the turns that it makes unusable. Pure: nothing is read here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import orjson

from opd.replay.recordings.recorded import ImportProblem
from records.messages import Message, content_text

ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_PARTS = ("text", "input_text", "output_text")
_IMAGE_PARTS = ("image", "image_url", "input_image")
_KEPT = ("name", "tool_call_id", "reasoning_content")
FEEDBACK_ROLE = "feedback"
"""The role under which the records keep feedback (`records.feedback.feedback.ROLE`, which loads
SQL).
"""
IMAGE_PLACEHOLDER = "[image]"
"""What stands for an image in the text of a message, so that a judge sees that there was one."""


class Fault(NamedTuple):
    """What is wrong with a message."""

    reason: ImportProblem
    detail: str


def checked_message(raw: Any, *, feedback: bool = False) -> tuple[Message, Fault | None]:
    """`raw` as an OpenAI chat message with only the known fields, and its first fault.

    Tool calls have their arguments as JSON text; images become a placeholder. With `feedback`, the
    role under which a record keeps feedback is known too.
    """
    if not isinstance(raw, dict):
        fault = Fault(ImportProblem.BAD_SHAPE, f"a message is an object, not {_kind(raw)}")
        return {"role": "unknown", "content": ""}, fault
    role = raw.get("role")
    message: Message = {"role": role if isinstance(role, str) else "unknown"}
    message["content"], content_fault = _content(raw.get("content"))
    faults = [_role_fault(role, feedback), content_fault, _older_call_fault(raw)]
    if raw.get("tool_calls"):
        message["tool_calls"], call_fault = _calls(raw["tool_calls"])
        faults.append(call_fault)
        if role != "assistant":
            detail = f"a message of role {role!r} has tool calls"
            faults.append(Fault(ImportProblem.BAD_TOOL_CALL, detail))
    for key in _KEPT:
        if isinstance(raw.get(key), str):
            message[key] = raw[key]
    faults.append(_empty_fault(message))
    return message, next((fault for fault in faults if fault is not None), None)


def results_without_calls(messages: Iterable[Message]) -> Iterator[tuple[int, Fault]]:
    """Index and fault of each tool result that answers no call of an earlier message."""
    calls: set[str] = set()
    for index, message in enumerate(messages):
        calls.update(call["id"] for call in message.get("tool_calls", ()) if call.get("id"))
        if message["role"] == "tool" and message.get("tool_call_id") not in calls:
            answered = message.get("tool_call_id")
            what = f"no earlier message calls {answered!r}" if answered else "no tool_call_id"
            yield index, Fault(ImportProblem.TOOL_RESULT_WITHOUT_CALL, what)


def checked_tools(raw: Any) -> tuple[list[dict[str, Any]], Fault | None]:
    """Tool definitions in OpenAI's shape; bare functions are wrapped. None if there is a fault."""
    if raw is None:
        return [], None
    if not isinstance(raw, list):
        return [], Fault(ImportProblem.BAD_SHAPE, f"tools are a list, not {_kind(raw)}")
    tools: list[dict[str, Any]] = []
    for index, tool in enumerate(raw):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return [], Fault(ImportProblem.BAD_SHAPE, f"tools[{index}] has no function name")
        tools.append(tool if "function" in tool else {"type": "function", "function": tool})
    if _json_text(tools) is None:
        return [], Fault(ImportProblem.BAD_SHAPE, "tools nest too deep to be written as JSON")
    return tools, None


def _role_fault(role: Any, feedback: bool) -> Fault | None:
    if role in ROLES or (feedback and role == FEEDBACK_ROLE):
        return None
    return Fault(ImportProblem.UNKNOWN_ROLE, f"role {role!r}; known are {', '.join(ROLES)}")


def _content(content: Any) -> tuple[Any, Fault | None]:
    """Content that can be kept: a string, or text parts."""
    if content is None:
        return "", None
    if isinstance(content, str):
        return content, None
    if not isinstance(content, list):
        fault = Fault(ImportProblem.BAD_SHAPE, f"content is text or parts, not {_kind(content)}")
        return "", fault
    parts: list[dict[str, str]] = []
    fault = None
    for part in content:
        text, part_fault = _part(part)
        parts.append({"type": "text", "text": text})
        fault = fault or part_fault
    return parts, fault


def _part(part: Any) -> tuple[str, Fault | None]:
    if isinstance(part, str):
        return part, None
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _TEXT_PARTS and isinstance(part.get("text"), str):
        return part["text"], None
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return part["refusal"], None
    if kind in _IMAGE_PARTS:
        detail = "an image, and only text can be rendered"
        return IMAGE_PLACEHOLDER, Fault(ImportProblem.IMAGE, detail)
    return "", Fault(ImportProblem.BAD_SHAPE, f"a content part of type {kind!r}")


def _calls(raw: Any) -> tuple[list[dict[str, Any]], Fault | None]:
    """Tool calls that can be kept, with their arguments as text."""
    if not isinstance(raw, list):
        fault = Fault(ImportProblem.BAD_TOOL_CALL, f"tool_calls is a list, not {_kind(raw)}")
        return [], fault
    calls: list[dict[str, Any]] = []
    fault = None
    for index, call in enumerate(raw):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            detail = f"tool_calls[{index}] has no function name"
            fault = fault or Fault(ImportProblem.BAD_TOOL_CALL, detail)
            continue
        given = function.get("arguments")
        arguments = "{}" if given is None else given
        if isinstance(given, dict):
            arguments = _json_text(given)
        if not isinstance(arguments, str):
            what = "that nest too deep" if isinstance(given, dict) else f"of type {_kind(given)}"
            detail = f"tool_calls[{index}] has arguments {what}"
            fault = fault or Fault(ImportProblem.BAD_TOOL_CALL, detail)
            continue
        kept = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        identity = call.get("id")
        calls.append({"id": identity, **kept} if isinstance(identity, str) else kept)
    return calls, fault


def _json_text(value: Any) -> str | None:
    """`value`, which was read from JSON, as JSON again; None if it nests too deep for that."""
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:
        return None


def _older_call_fault(raw: dict[str, Any]) -> Fault | None:
    if not raw.get("function_call"):
        return None
    detail = "'function_call' is OpenAI's older form; write it as 'tool_calls'"
    return Fault(ImportProblem.BAD_TOOL_CALL, detail)


def _empty_fault(message: Message) -> Fault | None:
    """A tool may return nothing and a system prompt may be empty; an utterance may not."""
    if message["role"] not in ("user", "assistant") or message.get("tool_calls"):
        return None
    if content_text(message["content"]).strip() or message.get("reasoning_content", "").strip():
        return None
    return Fault(ImportProblem.EMPTY_MESSAGE, f"the {message['role']} says nothing")


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
