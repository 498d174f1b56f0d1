"""Turns a request to `/v1/responses` into a chat completion. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from pydantic import ValidationError

from api_proxy.access.request_limits import check_metadata
from api_proxy.errors import ApiError, beyond, invalid, unsupported
from api_proxy.request.fields import SAMPLING, SESSION, SHAPING, check_fields, is_media, text_only
from api_proxy.responses_api.items import messages_of
from api_proxy.responses_api.schemas import ResponsesRequest, TextFormat
from api_proxy.responses_api.tools import chat_tools, namespaces_of
from records.messages import Message

_SAME_FIELDS = ("temperature", "top_p", "stream", "parallel_tool_calls", "top_logprobs")
_TAKEN_FIELDS = (*SESSION, *SAMPLING, *SHAPING, "stop", "user", "safety_identifier")
"""Fields of chat completions that are passed on as they are."""
_ECHOED_FIELDS = ("previous_response_id", "metadata", "tool_choice", "parallel_tool_calls")
_ECHOED_FIELDS += ("temperature", "top_p", "max_output_tokens", "top_logprobs", "text")
_ECHOED_FIELDS += ("user", "safety_identifier", "prompt_cache_key")
_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")
"""Reasoning is sent in the clear, so that nothing is lost without its encrypted form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Previous:
    """The conversation up to an earlier response, with its reply but without its instructions."""

    turn_id: str
    messages: Sequence[Message]


def parsed(body: dict[str, Any]) -> ResponsesRequest:
    """The request in `body`. Raises ApiError 400 with the name of the first fault."""
    _refuse_unsupported(body)
    check_metadata(body.get("metadata"))
    ignored_fields(body)
    try:
        request = ResponsesRequest.model_validate(body)
    except ValidationError as error:
        raise _worded(error) from None
    for name in request.include or ():
        if name not in _INCLUDED:
            raise unsupported(f"'include' of {name[:100]!r} is not supported.", "include")
    return request


def chat_body(
    body: dict[str, Any], request: ResponsesRequest, previous: Previous | None
) -> dict[str, Any]:
    """The fields of the chat completion that `request`, parsed from `body`, asks for.

    Raises ApiError 400 on what is not supported.
    """
    messages: list[Message] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if previous is not None:
        messages += previous.messages
    messages += messages_of(request.input)
    if not messages:
        raise invalid("One of 'input' and 'instructions' is required.", "input")
    chat = {name: body[name] for name in _TAKEN_FIELDS if name in body}
    chat |= {"model": request.model, "messages": messages}
    for name in _SAME_FIELDS:
        if getattr(request, name) is not None:
            chat[name] = getattr(request, name)
    if request.max_output_tokens is not None:
        chat["max_completion_tokens"] = request.max_output_tokens
    if request.top_logprobs or _LOGPROBS in (request.include or ()):
        chat["logprobs"] = True
    if request.tools:
        chat["tools"] = chat_tools(request.tools)
    if request.tool_choice is not None:
        chat["tool_choice"] = _choice(request.tool_choice)
    if request.text is not None and request.text.format is not None:
        chat["response_format"] = _response_format(request.text.format)
    return chat


def echo_of(
    body: dict[str, Any], request: ResponsesRequest, created_at: float, max_bytes: int
) -> dict[str, Any]:
    """What the response repeats from its request, and what continuing it later needs.

    `has_instructions`: the first message of the prompt is not carried over to the next response.
    Raises ApiError 400 if that is more than `max_bytes` as JSON.
    """
    echoed = {name: body[name] for name in _ECHOED_FIELDS if body.get(name) is not None}
    if namespaces := namespaces_of(request.tools or ()):
        echoed["namespaces"] = namespaces
    if (num_bytes := len(orjson.dumps(echoed))) > max_bytes:
        message = f"What the response repeats from the request has {num_bytes} bytes; at most "
        raise beyond("echo", f"{message}{max_bytes}.", None, "request_too_large")
    return {
        "api": "responses",
        "created_at": int(created_at),
        "has_instructions": bool(request.instructions),
        "model": request.model,
        **echoed,
    }


def ignored_fields(body: dict[str, Any]) -> tuple[str, ...]:
    """The fields without effect. Raises ApiError 400 on one that is not supported."""
    ignored = check_fields(body, (*ResponsesRequest.model_fields, *_TAKEN_FIELDS, "truncation"))
    text = body.get("text")
    dial = isinstance(text, dict) and text.get("verbosity") is not None
    return (*ignored, "text.verbosity") if dial else ignored


def _refuse_unsupported(body: dict[str, Any]) -> None:
    if body.get("truncation") not in (None, "disabled"):
        raise unsupported("Only 'truncation' = 'disabled' is supported.", "truncation")


def _choice(choice: str | dict[str, Any]) -> Any:
    if isinstance(choice, str):
        return choice
    if choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        if not isinstance(tools, list) or not tools:
            raise invalid("'tool_choice' must list the allowed tools in 'tools'.", "tool_choice")
        named = [_allowed(tool) for tool in tools]
        allowed = {"mode": choice.get("mode", "auto"), "tools": named}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    if choice.get("type") != "function":
        kind = str(choice.get("type"))[:100]
        raise unsupported(f"'tool_choice' of type {kind!r} is not supported.", "tool_choice")
    return {"type": "function", "function": {"name": choice.get("name")}}


def _allowed(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        kind = str(tool.get("type") if isinstance(tool, dict) else tool)[:100]
        raise unsupported(f"'tool_choice' may allow functions only, not {kind!r}.", "tool_choice")
    return {"type": "function", "function": {"name": tool.get("name")}}


def _response_format(wanted: TextFormat) -> dict[str, Any]:
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    schema = {"name": wanted.name or "output", "schema": wanted.schema_, "strict": wanted.strict}
    named = {key: value for key, value in schema.items() if value is not None}
    return {"type": "json_schema", "json_schema": named}


def _worded(error: ValidationError) -> ApiError:
    """The first fault, with OpenAI's way of naming its place."""
    fault = error.errors(include_input=False, include_url=False)[0]
    param = ""
    for step in fault["loc"]:
        if isinstance(step, int):
            param += f"[{step}]"
        elif step not in _TAGS:
            param += f".{step}" if param else step
    if fault["type"] == "union_tag_invalid":
        context = fault.get("ctx", {})
        tag, expected = str(context.get("tag"))[:100], context.get("expected_tags")
        if is_media(tag):
            return text_only(param, tag, f"{param}.type")
        return unsupported(
            f"{param}: {tag!r} is not supported here, only {expected}.", f"{param}.type"
        )
    code = "missing_required_parameter" if fault["type"] == "missing" else "invalid_value"
    return invalid(f"Invalid value for '{param}': {fault['msg']}.", param or None, code)


_TAGS = ("message", "function_call", "function_call_output", "reasoning")
"""Steps that a discriminated union adds to the place of a fault."""
