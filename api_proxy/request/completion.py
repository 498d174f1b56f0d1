"""A checked request: made from the body of `/v1/chat/completions`, or from what another API's body
means, with the texts of refusals.

The models of `schemas` check; the messages and tools that go on are the client's own dicts,
unchanged, because they are the identity of a conversation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from pydantic import ValidationError

from api_proxy.access.request_limits import RequestLimits, check_metadata
from api_proxy.errors import ApiError, beyond, invalid, unsupported
from api_proxy.request.fields import check_fields, text_only
from api_proxy.request.schemas import (
    NESTED_FIELDS,
    TEXT_PARTS,
    AllowedChoice,
    ChatRequest,
    NamedChoice,
    StructuredOutputs,
)
from records.messages import Message
from records.names import TurnType

_ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What an answer must be: JSON that matches `schema`, what `regex` matches, or one of
    `choices`.
    """

    schema: dict[str, Any] | None = None
    regex: str | None = None
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A checked request: its fields, and the client's own messages and tools.

    `request_echo` is what the response repeats from it, and what its client may read again later if
    `is_retrievable`; `parent_turn_id` the turn that it says it continues. `prompt_ids` are those of
    a text to be continued, for which there is nothing to render. `shape` is what the answer must be
    (None: any text), `ignored` the fields that have no effect.
    """

    fields: ChatRequest
    messages: list[Message]
    tools: list[dict[str, Any]]
    session: str | None
    turn_type: TurnType | None
    session_done: bool
    teacher: str | None = None
    source: str | None = None
    request_echo: dict[str, Any] | None = None
    is_retrievable: bool = False
    prompt_ids: tuple[int, ...] | None = None
    parent_turn_id: str | None = None
    traceparent: str | None = None
    """The agent's own trace (W3C Trace Context)."""
    num_bytes: int = 0
    """Of messages and tools together, as JSON."""
    shape: Shape | None = None
    ignored: tuple[str, ...] = ()

    @property
    def stop(self) -> tuple[str, ...]:
        """The stop strings; empty ones are left out."""
        stop = self.fields.stop
        texts = [stop] if isinstance(stop, str) else stop or []
        return tuple(text for text in texts if text)

    @property
    def requested_tokens(self) -> int | None:
        """The reply budget that the client asked for."""
        newer = self.fields.max_completion_tokens
        return newer if newer is not None else self.fields.max_tokens

    @property
    def user_id(self) -> str | None:
        """The end user of the client, under OpenAI's newer or older name."""
        return self.fields.safety_identifier or self.fields.user or None

    @property
    def include_usage(self) -> bool:
        """Whether a streamed reply ends with a usage chunk."""
        options = self.fields.stream_options
        return options is not None and options.include_usage


def completion_of(
    body: dict[str, Any], headers: Mapping[str, str], limits: RequestLimits
) -> Completion:
    """The request whose fields are `body`: what a client sent, or what another API's request means.
    Session fields may be in the headers, which take precedence over the body.

    Raises ApiError 400 on anything that cannot be served.
    """
    messages = body.get("messages")
    most = limits.config.max_messages
    if isinstance(messages, list) and len(messages) > most:
        raise beyond(
            "messages",
            f"The conversation has {len(messages)} messages; at most {most} are accepted.",
            "messages",
            "array_above_max_length",
        )
    check_metadata(body.get("metadata"))
    if isinstance(messages, list):
        _check_parts(messages)
    try:
        fields = ChatRequest.model_validate(body)
    except ValidationError as error:
        raise _worded(error) from None
    ignored = check_fields(body, ChatRequest.model_fields)
    if fields.top_logprobs and not fields.logprobs:
        raise invalid("'top_logprobs' needs 'logprobs' = true.", "top_logprobs")
    tools = body.get("tools") or []
    _check_tool_choice(fields)
    num_bytes = limits.check_prompt(body["messages"], tools)
    limits.check_arguments(body["messages"])
    if isinstance(fields.tool_choice, AllowedChoice):
        allowed = fields.tool_choice.allowed_tools
        names = {tool.function.name for tool in allowed.tools}
        # The model is shown no others.
        tools = [tool for tool in tools if tool["function"]["name"] in names]
        fields = fields.model_copy(update={"tool_choice": allowed.mode})
    shape = _shape(fields)
    _check_schemas(shape, fields.tool_choice, tools, limits)
    return Completion(
        fields=fields,
        messages=body["messages"],
        tools=tools,
        session=_session(headers, fields),
        turn_type=_turn_type(headers, fields),
        session_done=_session_done(headers, fields),
        teacher=_name_in(headers, "X-Teacher", "teacher", fields.teacher),
        source=_name_in(headers, "X-Data-Source", "data_source", fields.data_source),
        traceparent=headers.get("traceparent"),
        num_bytes=num_bytes,
        shape=shape,
        ignored=ignored,
    )


def _worded(error: ValidationError) -> ApiError:
    """The first fault of a request, with OpenAI's way of naming its place."""
    fault = error.errors(include_input=False, include_context=False, include_url=False)[0]
    param = ""
    for step in fault["loc"]:
        if isinstance(step, int):
            param += f"[{step}]"
        elif step in ChatRequest.model_fields or step in NESTED_FIELDS:
            param += f".{step}" if param else step
    if fault["type"] == "extra_forbidden":
        param = f"{param}.{str(fault['loc'][-1])[:100]}"
        return unsupported(f"'{param}' is not supported.", param)
    code = "missing_required_parameter" if fault["type"] == "missing" else "invalid_value"
    return invalid(f"Invalid value for '{param}': {fault['msg']}.", param or None, code)


def _shape(fields: ChatRequest) -> Shape | None:
    """What the answer must be. Raises ApiError 400 if it must be several things."""
    asked, wanted = fields.response_format, fields.structured_outputs
    given: dict[str, Shape] = {}
    if asked is not None and asked.type == "json_schema" and asked.json_schema is not None:
        given["response_format"] = Shape(schema=asked.json_schema.schema_ or {})
    elif asked is not None and asked.type == "json_object":
        given["response_format"] = Shape(schema=_ANY_OBJECT)
    for name in ("regex", "guided_regex"):
        if (pattern := getattr(fields, name)) is not None:
            given[name] = Shape(regex=pattern)
    if fields.guided_json is not None:
        given["guided_json"] = Shape(schema=_schema_of(fields.guided_json, "guided_json"))
    if fields.guided_choice is not None:
        given["guided_choice"] = Shape(choices=tuple(fields.guided_choice))
    if wanted is not None:
        given |= _structured(wanted)
    if len(given) > 1:
        names = " and ".join(f"'{name}'" for name in given)
        raise invalid(f"An answer has one form: send one of {names}.", next(reversed(given)))
    return next(iter(given.values()), None)


def _structured(wanted: StructuredOutputs) -> dict[str, Shape]:
    given: dict[str, Shape] = {}
    if wanted.json_ is not None:
        name = "structured_outputs.json"
        given[name] = Shape(schema=_schema_of(wanted.json_, name))
    if wanted.regex is not None:
        given["structured_outputs.regex"] = Shape(regex=wanted.regex)
    if wanted.choice is not None:
        given["structured_outputs.choice"] = Shape(choices=tuple(wanted.choice))
    if wanted.json_object:
        given["structured_outputs.json_object"] = Shape(schema=_ANY_OBJECT)
    return given


def _schema_of(given: dict[str, Any] | str, name: str) -> dict[str, Any]:
    """A JSON schema that may have been sent as text."""
    if isinstance(given, dict):
        return given
    try:
        schema = orjson.loads(given)
    except orjson.JSONDecodeError:
        schema = None
    if not isinstance(schema, dict):
        raise invalid(f"'{name}' must be a JSON schema: an object, or its text.", name)
    return schema


def _check_parts(messages: list[Any]) -> None:
    """Raises ApiError 400 with the place of the first part that is not text."""
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            continue
        if message.get("audio"):
            raise text_only(f"messages[{index}].audio", "audio")
        content = message.get("content")
        for at, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind not in TEXT_PARTS:
                raise text_only(f"messages[{index}].content[{at}]", kind)


def _check_tool_choice(fields: ChatRequest) -> None:
    choice = fields.tool_choice
    if choice in (None, "auto", "none"):
        return
    if not fields.tools:
        raise invalid("'tool_choice' needs 'tools'.", "tool_choice")
    offered = {tool.function.name for tool in fields.tools}
    if isinstance(choice, NamedChoice):
        named = [choice]
    else:
        named = choice.allowed_tools.tools if isinstance(choice, AllowedChoice) else []
    if any(one.function.name not in offered for one in named):
        raise invalid("'tool_choice' names a function that is not in 'tools'.", "tool_choice")


def _check_schemas(
    shape: Shape | None,
    choice: str | NamedChoice | AllowedChoice | None,
    tools: Sequence[dict[str, Any]],
    limits: RequestLimits,
) -> None:
    """Check what becomes a grammar: the form of the text, and the schemas of the calls that it
    allows.
    """
    given: list[Any] = []
    if shape is not None:
        given.append(shape.schema if shape.schema is not None else [shape.regex, *shape.choices])
    if isinstance(choice, NamedChoice) or choice == "required":
        name = choice.function.name if isinstance(choice, NamedChoice) else None
        given += [tool for tool in tools if name in (None, tool["function"]["name"])]
    elif shape is not None and choice != "none":
        given += tools
    if given:
        limits.check_schemas(given, "tools" if shape is None else "response_format")


def _session(headers: Mapping[str, str], fields: ChatRequest) -> str | None:
    name = headers.get("x-session-id") or fields.session_id
    if name is not None and (len(name) > 256 or not name.isprintable()):
        raise invalid("A session id has at most 256 characters, all printable.", "session_id")
    return name


def _name_in(
    headers: Mapping[str, str], header: str, param: str, in_body: str | None
) -> str | None:
    name = headers.get(header.lower(), "").strip() or (in_body or "").strip()
    if len(name) > 256 or not name.isprintable():
        raise invalid(f"'{header}' ('{param}') has at most 256 characters, all printable.", param)
    return name or None


def _turn_type(headers: Mapping[str, str], fields: ChatRequest) -> TurnType | None:
    text = headers.get("x-turn-type")
    if text is None:
        return fields.turn_type
    named = text.strip().lower()
    if named not in (TurnType.MAIN, TurnType.SIDE):
        raise invalid("'X-Turn-Type' must be 'main' or 'side'.", "turn_type")
    return TurnType(named)


def _session_done(headers: Mapping[str, str], fields: ChatRequest) -> bool:
    text = headers.get("x-session-done")
    if text is None:
        return bool(fields.session_done)
    return text.strip().lower() in ("1", "true", "yes")
