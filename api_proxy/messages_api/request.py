"""Turns a request to `/v1/messages` into a chat completion. Pure.

Blocks become messages of the conversation tree, in the form that the other APIs give them, so that
a conversation that began elsewhere is recognised. A user message with tool results becomes tool
messages and, for its text, user messages, in their order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from api_proxy.errors import ApiError, invalid, unsupported
from api_proxy.messages_api.schemas import (
    AssistantMessage,
    MessagesRequest,
    SystemMessage,
    Text,
    Thinking,
    Tool,
    ToolChoice,
    ToolResult,
    ToolUse,
    UserMessage,
)
from api_proxy.request.fields import SAMPLING, SESSION, SHAPING, check_fields, is_media, text_only
from records.messages import Message

UNPARSED_ARGUMENTS = "__unparsed_arguments__"
"""The only key of a tool call's `input` if the policy did not write a JSON object. Its value is the
text, so that the call can be sent at all and comes back unchanged.
"""
_TAGS = ("user", "assistant", "system", "text", "thinking", "tool_use", "tool_result")
_BILLING_HEADER = "x-anthropic-billing-header:"
"""A system block that begins with this is the client's bookkeeping and differs in each request."""
_SAME_FIELDS = ("stream", "temperature", "top_p", *SAMPLING, *SHAPING, *SESSION)


def chat_body(body: dict[str, Any], *, needs_budget: bool = True) -> dict[str, Any]:
    """The fields of the chat completion that `body` asks for.

    Raises ApiError 400 with the place of the first fault, or the name of what is not supported.
    `needs_budget`: `max_tokens` is required.
    """
    ignored_fields(body)
    try:
        request = MessagesRequest.model_validate(body)
    except ValidationError as error:
        raise _worded(error) from None
    if needs_budget and request.max_tokens is None:
        raise invalid("max_tokens: Field required", "max_tokens", "missing_required_parameter")
    if request.messages[-1].role == "assistant":
        raise unsupported(
            "messages: the conversation must end with a user message; prefilling the assistant's "
            "message is not supported.",
            "messages",
        )
    _check_edits(request.context_management)
    chat = {name: body[name] for name in _SAME_FIELDS if name in body}
    metadata = body.get("metadata")
    if isinstance(metadata, dict) and isinstance(metadata.get("user_id"), str):
        chat["user"] = metadata["user_id"][:512]
    chat |= {"model": request.model, "messages": _messages(request)}
    if request.max_tokens is not None:
        chat["max_tokens"] = request.max_tokens
    if request.tools:
        chat["tools"] = [_tool(tool) for tool in request.tools]
    if request.tool_choice is not None:
        chat |= _choice(request.tool_choice)
    if request.stop_sequences:
        chat["stop"] = request.stop_sequences
    if request.output_config is not None and request.output_config.format is not None:
        chat["response_format"] = _response_format(request.output_config.format)
    return chat


def ignored_fields(body: dict[str, Any]) -> tuple[str, ...]:
    """The fields without effect. Raises ApiError 400 on one that is not supported."""
    ignored = check_fields(body, (*MessagesRequest.model_fields, *_SAME_FIELDS))
    output = body.get("output_config")
    dial = isinstance(output, dict) and output.get("effort") is not None
    return (*ignored, "output_config.effort") if dial else ignored


def _messages(request: MessagesRequest) -> list[Message]:
    messages: list[Message] = []
    system = [block for block in request.system or () if not _is_bookkeeping(block)]
    if system:
        messages.append({"role": "system", "content": _content(system)})
    for message in request.messages:
        if isinstance(message, UserMessage):
            messages += _user_messages(message)
        elif isinstance(message, SystemMessage):
            messages.append({"role": "system", "content": _content(message.content)})
        else:
            messages.append(_assistant_message(message))
    return messages


def _is_bookkeeping(block: Text) -> bool:
    return block.text.startswith(_BILLING_HEADER)


def _user_messages(message: UserMessage) -> list[Message]:
    messages: list[Message] = []
    texts: list[Text] = []
    for block in message.content:
        if isinstance(block, Text):
            texts.append(block)
            continue
        if texts:
            messages.append({"role": "user", "content": _content(texts)})
            texts = []
        messages.append(_tool_message(block))
    if texts or not messages:
        messages.append({"role": "user", "content": _content(texts)})
    return messages


def _tool_message(result: ToolResult) -> Message:
    content = _content(result.content or [])
    if result.is_error and not content:
        # Otherwise nothing would show that the call failed.
        content = "error"
    return {"role": "tool", "tool_call_id": result.tool_use_id, "content": content}


def _assistant_message(message: AssistantMessage) -> Message:
    # A reply's text may have been cut into several blocks by the calls in between.
    texts = [block.text for block in message.content if isinstance(block, Text)]
    thoughts = [block.thinking for block in message.content if isinstance(block, Thinking)]
    calls = [_call(block) for block in message.content if isinstance(block, ToolUse)]
    chat: Message = {"role": "assistant", "content": "".join(texts) if texts else None}
    if not calls and not texts:
        chat["content"] = ""
    if thoughts:
        chat["reasoning_content"] = "\n".join(thoughts)
    if calls:
        chat["tool_calls"] = calls
    return chat


def _call(block: ToolUse) -> dict[str, Any]:
    unparsed = block.input.get(UNPARSED_ARGUMENTS)
    if len(block.input) == 1 and isinstance(unparsed, str):
        arguments = unparsed
    else:
        try:
            arguments = json.dumps(block.input, ensure_ascii=False)
        except RecursionError:
            raise invalid("messages: a tool_use input is nested too deeply.", "messages") from None
    function = {"name": block.name, "arguments": arguments}
    return {"id": block.id, "type": "function", "function": function}


def _content(texts: Sequence[Text]) -> str | list[dict[str, str]]:
    """One text as a string, several as separate parts."""
    if len(texts) <= 1:
        return texts[0].text if texts else ""
    return [{"type": "text", "text": block.text} for block in texts]


def _tool(tool: Tool) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise unsupported(
            f"tools: {tool.type[:100]!r} is not supported; only tools with an 'input_schema' are.",
            "tools",
        )
    if tool.input_schema is None:
        raise invalid("tools: 'input_schema' is required.", "tools", "missing_required_parameter")
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": {**function, "parameters": tool.input_schema}}


def _choice(choice: ToolChoice) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    if choice.type != "tool":
        return fields | {"tool_choice": "required" if choice.type == "any" else choice.type}
    if not choice.name:
        raise invalid("tool_choice.name: Field required", "tool_choice")
    named = {"type": "function", "function": {"name": choice.name}}
    return fields | {"tool_choice": named}


def _response_format(wanted: Mapping[str, Any]) -> dict[str, Any]:
    if wanted.get("type") != "json_schema" or not isinstance(wanted.get("schema"), dict):
        raise invalid(
            "output_config.format: must be {'type': 'json_schema', 'schema': {...}}.",
            "output_config",
        )
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": wanted["schema"]}}


def _check_edits(context_management: Mapping[str, Any] | None) -> None:
    """The chat template clears earlier thinking itself; no other edit is supported here."""
    edits = (context_management or {}).get("edits")
    for edit in edits if isinstance(edits, list) else ():
        kind = str(edit.get("type")) if isinstance(edit, dict) else "edit"
        if not kind.startswith("clear_thinking"):
            raise unsupported(
                f"context_management: {kind[:100]!r} is not supported.", "context_management"
            )


def _worded(error: ValidationError) -> ApiError:
    """The first fault, with Anthropic's way of naming its place."""
    fault = error.errors(include_input=False, include_url=False)[0]
    steps = fault["loc"]
    # The tag of a union follows the index of the entry that it belongs to.
    tagged = [at for at, step in enumerate(steps) if at and isinstance(steps[at - 1], int)]
    place = ".".join(
        str(step) for at, step in enumerate(steps) if at not in tagged or step not in _TAGS
    )
    if fault["type"] == "union_tag_invalid":
        context = fault.get("ctx", {})
        tag, expected = str(context.get("tag"))[:100], context.get("expected_tags")
        if is_media(tag):
            return text_only(place, tag)
        return unsupported(f"{place}: {tag!r} is not supported here, only {expected}.", place)
    code = "missing_required_parameter" if fault["type"] == "missing" else "invalid_value"
    return invalid(f"{place}: {fault['msg']}", place, code)
